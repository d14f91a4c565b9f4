"""Ops that make the host wait for a device: a graph without them can run as one CUDA graph."""

from typing import Any

import torch
from torch import fx

from tpcompile.program import Program, is_dynamic, operands, values
from tpcompile.torch_private import OpOverload


def host_syncs(program: Program) -> tuple[str, ...]:
    """Ops of a program that give Python a number, or a size, that depends on values of tensors.

    As "aten.nonzero.default in layers.0.mlp (moe.py:31)"; copies to the CPU count as well.
    Where there is none, nothing of the graph waits for a device.
    """
    graphs = [program.graph, *(block.graph for block in program.extra.get("blocks", {}).values())]
    found: dict[str, None] = {}
    for node in (n for graph in graphs for n in graph.nodes if n.op == "call_function"):
        if _reads_values(node) or _leaves_device(node):
            where = f" ({node.meta['where']})" if node.meta.get("where") else ""
            found[f"{node.target} in {node.meta.get('path') or 'the root'}{where}"] = None
    return tuple(found)


def _reads_values(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    if torch.Tag.data_dependent_output in node.target.tags:
        return True
    sizes: list[Any] = [s for value in values(node) for s in value.shape if is_dynamic(s)]
    by_value = any(not size.node.has_hint() for size in sizes)
    return torch.Tag.dynamic_output_shape in node.target.tags and by_value


def _leaves_device(node: fx.Node) -> bool:
    to_cpu = any(value.device.type == "cpu" for value in values(node))
    return to_cpu and any(n.meta["val"].device.type not in ("cpu", "meta") for n in operands(node))
