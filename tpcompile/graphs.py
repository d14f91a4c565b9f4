"""The GraphModules that a sharded model runs, made readable."""

from typing import Any

import torch
from torch import Tensor, fx, nn

from tpcompile.dims import Dim, contains, segments_of
from tpcompile.dump import block_labels, remarks
from tpcompile.labels import Labels
from tpcompile.layout import local_length
from tpcompile.program import Program, values
from tpcompile.runtime import GRAPHS, Variant, call_block


def graph_module_of(variant: Variant) -> fx.GraphModule:
    """The graph around the blocks; its nodes say what this rank holds."""
    _annotate(variant.root.graph, Labels(variant.program))
    return variant.root


def blocks_of(variant: Variant, modules: dict[str, nn.Module]) -> dict[str, fx.GraphModule]:
    """Path of each block -> its graph; blocks alike share one."""
    found: dict[str, fx.GraphModule] = {}
    seen: set[int] = set()
    for path in variant.program.extra["blocks"]:
        found[path] = modules[path].__dict__[GRAPHS][_number(variant, path)].module
        if id(found[path]) not in seen:
            seen.add(id(found[path]))
            _annotate(found[path].graph, block_labels(variant.program, path))
    return found


def _number(variant: Variant, path: str) -> int:
    """Which of a block's graphs the variant calls."""
    parts = tuple(path.split("."))
    calls = variant.root.graph.find_nodes(op="call_function", target=call_block)
    return next(n.args[2] for n in calls if n.args[1] == parts)  # type: ignore[return-value]


def _annotate(graph: fx.Graph, labels: Labels) -> None:
    """What `print_readable` prints: local shapes, and a line of module, placement and style."""
    for node in graph.nodes:
        if node.op == "output" or "local" in node.meta:
            continue
        node.meta["local"] = True
        if node.op == "call_function":
            node.meta["stack_trace"] = _trace(node, labels)
        if values(node) and node.meta.get("dims"):
            parts = [_local(node, i, labels) for i in range(len(values(node)))]
            single = isinstance(node.meta["val"], Tensor)
            node.meta["val"] = parts[0] if single else tuple(parts)


def _trace(node: fx.Node, labels: Labels) -> str:
    """In the form that print_readable knows: a file, a line, a place and a text."""
    file, _, line = node.meta.get("where", "").rpartition(":")
    path = labels.path(node.meta.get("path", "")) or labels.within or "forward"
    said = [labels.placement(node)] if values(node) else []
    said += [r for r in remarks(node, labels) if r != path]
    return f'File "{file or "tpcompile"}", line {line or 0}, in {path}\n  {", ".join(said)}'


def _local(node: fx.Node, index: int, labels: Labels) -> Tensor:
    """This rank's part of an output, as a fake tensor."""
    val, dims = values(node)[index], node.meta["dims"][index]
    states = labels.states(node)
    state = states[index] if index < len(states) else None
    if not isinstance(state, Dim):
        return val
    shape = [
        _length(size, dim, state, labels.program) if dim and contains(dim, state) else size
        for size, dim in zip(val.shape, dims, strict=True)
    ]
    return val.new_empty(shape)


def _length(size: Any, dim: Dim, atom: Dim, program: Program) -> Any:
    _, degree, rank = program.extra["axis"]
    if isinstance(size, torch.SymInt):
        return size // degree
    return local_length(segments_of(dim, atom), degree, rank)
