"""Give every block a graph of its own, so that the user's block modules stay modules."""

import heapq
import operator
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import fx

from tpcompile.program import Program
from tpcompile.runtime import call_block


@dataclass
class BlockGraph:
    """The graph of one block: placeholders are its inputs, then its parameters."""

    graph: fx.Graph
    parameters: tuple[str, ...]
    """Placeholder names in the program, in the order the graph takes them."""
    n_inputs: int


def split_blocks(program: Program) -> Program:
    """Move the nodes of every block into a graph of its own and call it.

    Before:  %h = linear(%x, %w)   %y = relu(%h)          (both in block layers.0)
    After:   %y = call_block("layers.0", %x)              layers.0: relu(linear(x, w))

    Sets `program.extra["blocks"]`: path -> BlockGraph.
    """
    members: dict[str, list[fx.Node]] = defaultdict(list)
    for node in program.calls():
        if node.meta.get("block"):
            members[node.meta["block"]].append(node)
    program.extra["blocks"] = {
        path: _split(program, path, nodes) for path, nodes in members.items()
    }
    _sort(program.graph)
    return program


def _split(program: Program, path: str, nodes: list[fx.Node]) -> BlockGraph:
    inside = set(nodes)
    inputs: dict[fx.Node, None] = {}
    parameters: dict[fx.Node, None] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in inside:
                target = parameters if program.is_parameter(source) else inputs
                target[source] = None
    outputs = [n for n in nodes if any(user not in inside for user in n.users)]
    graph, mapping = fx.Graph(), {}
    for i, source in enumerate((*inputs, *parameters)):
        name = f"x{i}" if source in inputs else _relative(program, source, path)
        mapping[source] = graph.placeholder(name)
        mapping[source].meta.update(source.meta)
    for node in nodes:
        copy = graph.create_node(
            node.op,
            node.target,
            fx.map_arg(node.args, mapping.__getitem__),
            fx.map_arg(node.kwargs, mapping.__getitem__),
        )
        copy.meta.update(node.meta)
        mapping[node] = copy
    results = tuple(mapping[n] for n in outputs)
    graph.output(results[0] if len(results) == 1 else results)
    _replace(program, path, nodes, list(inputs), outputs)
    return BlockGraph(graph, tuple(p.name for p in parameters), len(inputs))


def _relative(program: Program, node: fx.Node, path: str) -> str:
    name = program.leaves[node.name].name
    own = name.removeprefix(path + ".").replace(".", "_")
    return own if own.isidentifier() else f"p{own}"  # children of nn.Sequential are numbers


def _replace(
    program: Program, path: str, nodes: list[fx.Node], inputs: list[Any], outputs: list[fx.Node]
) -> None:
    """Put the call where the block's last input is ready, and drop the nodes it stands for."""
    graph = program.graph
    with graph.inserting_after(nodes[-1]):
        call = graph.call_function(call_block, (path, *inputs))
        call.meta.update(path=path, block="", modules=(), calls=(), where="")
        results = [call]
        if len(outputs) == 1:
            call.meta["val"], call.meta["dims"] = outputs[0].meta["val"], outputs[0].meta["dims"]
        else:
            call.meta["val"] = tuple(n.meta["val"] for n in outputs)
            results = []
            for i, old in enumerate(outputs):
                with graph.inserting_after(results[-1] if results else call):
                    results.append(graph.call_function(operator.getitem, (call, i)))
                results[-1].meta.update(old.meta, block="")
    for old, new in zip(outputs, results, strict=True):
        old.replace_all_uses_with(new)
    for node in reversed(nodes):
        graph.erase_node(node)


def _sort(graph: fx.Graph) -> None:
    """Stable topological order: a block's call may stand after an early reader of its output."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    waiting = {node: len(node.all_input_nodes) for node in place}
    ready = [(i, node) for node, i in place.items() if not waiting[node]]
    heapq.heapify(ready)
    last = None
    while ready:
        _, node = heapq.heappop(ready)
        if last is not None:
            last.append(node)
        last = node
        for user in node.users:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, (place[user], user))
