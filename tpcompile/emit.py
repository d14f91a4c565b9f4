"""Turn a localised program into GraphModules bound to the user's module tree."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from tpcompile.passes.split_blocks import BlockGraph
from tpcompile.program import Program
from tpcompile.runtime import LocalGraph, Source, Variant, call_block, replace_block_forward
from tpcompile.size_check import size_check


def emit(program: Program, modules: Mapping[str, nn.Module], mesh: DeviceMesh) -> Variant:
    """The runnable form of a program whose blocks have been split off.

    Identical blocks share one GraphModule.  Block modules get their new forward here.

    Args:
        program: Localised.
        modules: By the path that each had when the model was captured; "" is the model.
        mesh: The axis.
    """
    rank = mesh.get_local_rank()
    shared: dict[str, fx.GraphModule] = {}
    numbers: dict[str, int] = {}
    blocks: dict[str, BlockGraph] = program.extra["blocks"]
    for path, block in blocks.items():
        module = _module(block.graph, f"{type(modules[path]).__name__}Local")
        module = shared.setdefault(module.code, module)
        graphs = replace_block_forward(modules[path])
        numbers[path] = len(graphs)
        sources = tuple(_source(program, modules, name) for name in block.parameters)
        graphs.append(LocalGraph(module, sources, rank))
    sources, constants = _bind_root(program, modules, numbers)
    updated = [n for n in program.updates if program.leaves[n].kind == "buffer"]
    return Variant(
        program=program,
        root=_module(program.graph, f"{type(modules['']).__name__}Local"),
        sources=sources,
        rank=rank,
        fits=size_check(program, program.extra["axis"][1], tuple(program.extra["dynamic"])),
        constants=constants,
        owners={n: _source(program, modules, n) for n in updated},
        mesh=mesh,
    )


def _module(graph: fx.Graph, name: str) -> fx.GraphModule:
    return fx.GraphModule(nn.Module(), graph, class_name=name)


def _bind_root(
    program: Program, modules: Mapping[str, nn.Module], numbers: dict[str, int]
) -> tuple[tuple[Source, ...], tuple[torch.Tensor, ...]]:
    """Put the placeholders in the order `Variant.run` passes; pass the model to block calls."""
    graph = program.graph
    sources, constants = [], []
    read: list[fx.Node] = []
    rest: list[fx.Node] = []
    for node in list(program.placeholders()):
        leaf = program.leaves[node.name]
        if leaf.kind in ("parameter", "buffer"):
            if not node.users:
                graph.erase_node(node)
                continue
            sources.append(_source(program, modules, node.name))
            read.append(node)
        elif leaf.kind == "constant":
            assert leaf.tensor is not None
            constants.append(leaf.tensor)
            rest.append(node)
    inputs = list(program.placeholders("input"))
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        root = graph.placeholder("model")
    last = root
    for node in (*read, *rest, *inputs):
        last.append(node)
        last = node
    for node in graph.find_nodes(op="call_function", target=call_block):
        path, *args = node.args
        node.args = (root, tuple(path.split(".")), numbers[path], *args)
    return tuple(sources), tuple(constants)


def _source(program: Program, modules: Mapping[str, nn.Module], placeholder: str) -> Source:
    leaf = program.leaves[placeholder]
    path, _, attr = leaf.name.rpartition(".")
    layouts: dict[str, Any] = program.extra["layouts"]
    layout = layouts[leaf.name] if leaf.kind == "parameter" else None
    return Source(modules[path], attr, layout)
