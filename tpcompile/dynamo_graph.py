"""The graph that Dynamo hands to a backend, lowered to a Program."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from tpcompile.dynamo_trace import set_locations, trace
from tpcompile.inline_modes import inline_modes
from tpcompile.program import Leaf, Program
from tpcompile.program_edit import arguments
from tpcompile.size_check import python_text
from tpcompile.torch_private import FakeTensor, shape_guards, sym_expr

aten = torch.ops.aten
Names = Mapping[int, Leaf]
"""Id of a tensor that the model owns -> parameter or buffer of this name."""
CARRIER = 1
"""Dim of a carrier, a tensor that is there for its size alone, which carries the size."""


@dataclass(frozen=True)
class Ends:
    """How a call of Dynamo's graph becomes one of the program, and back."""

    arguments: dict[str, int]
    """Placeholder of the program -> which argument of Dynamo's call it is."""
    carriers: dict[str, int]
    """Placeholder of a carrier -> the argument that is its size."""
    outputs: tuple[Any, ...]
    """Of each output: None for the program's next tensor, else a function of the arguments."""


def lower(
    gm: fx.GraphModule,
    names: Names,
    paths: Mapping[int, str],
    autocast: tuple[str, torch.dtype] | None,
) -> tuple[Program, Ends]:
    """(the program, how to call it) of a graph from Dynamo, inside of the backend call.

    What the lowering assumes of sizes is added to Dynamo's own guards.

    Args:
        gm: Is not changed.
        names: Of the tensors that the model owns, by the identity of what Dynamo saw.
        paths: Id of a module -> its path in the model.
        autocast: (device type, dtype) where autocast is on around the call.

    Raises:
        CaptureError: The graph has something that cannot be sharded.
    """
    given = gm.graph.find_nodes(op="placeholder")
    values = [node.meta["example_value"] for node in given]
    mode = next(v.fake_mode for v in values if isinstance(v, FakeTensor))
    traced = trace(gm, values, mode)
    graph = traced.graph
    program = Program(graph, {})
    program.extra["fake_mode"] = mode
    set_locations(graph, paths)
    places = dict(zip(graph.find_nodes(op="placeholder"), range(len(given)), strict=True))
    for node, value in zip(places, values, strict=True):
        if isinstance(value, Tensor):
            with mode, torch.no_grad():
                node.meta["val"] = value.detach().requires_grad_(value.requires_grad)
    _name_leaves(program, traced, places, given, names)
    carriers = _carry_sizes(program, places)
    inline_modes(program, autocast)
    _remove_unread(program)
    ends = Ends(
        {n.name: i for n, i in places.items() if n.name in program.leaves},
        carriers,
        _set_outputs(program, values),
    )
    _set_symbols(program)
    return program, ends


def _name_leaves(
    program: Program,
    traced: fx.GraphModule,
    places: Mapping[fx.Node, int],
    given: Sequence[fx.Node],
    names: Names,
) -> None:
    """Say what each placeholder is; constants become placeholders too."""
    first: dict[str, fx.Node] = {}
    for node, i in places.items():
        if not isinstance(node.meta["val"], Tensor):
            continue
        leaf = names.get(i) or Leaf("input", given[i].name)
        if leaf.kind != "input" and leaf.name in first:  # tied, and read under two names
            node.replace_all_uses_with(first[leaf.name])
            continue
        first[leaf.name] = node
        program.leaves[node.name] = leaf
    for node in program.graph.find_nodes(op="get_attr"):
        value = getattr(traced, str(node.target))
        with program.graph.inserting_before(next(iter(program.graph.nodes))):
            constant = program.graph.placeholder(str(node.target).replace(".", "_"))
        constant.meta = dict(node.meta)
        program.leaves[constant.name] = Leaf("constant", constant.name, value)
        node.replace_all_uses_with(constant)
        program.graph.erase_node(node)
    _sort_placeholders(program)


def _sort_placeholders(program: Program) -> None:
    """Parameters, buffers, constants, inputs, and last what is no tensor."""
    order = ("parameter", "buffer", "constant", "input")

    def rank(node: fx.Node) -> int:
        leaf = program.leaves.get(node.name)
        return order.index(leaf.kind) if leaf else len(order)

    first = next(iter(program.graph.nodes))
    nodes = sorted(program.graph.find_nodes(op="placeholder"), key=rank)
    for node in nodes:
        if node is not first:
            first.prepend(node)
    if nodes[-1] is not first:
        nodes[-1 if rank(first) == len(order) else nodes.index(first) - 1].append(first)


def _carry_sizes(program: Program, places: Mapping[fx.Node, int]) -> dict[str, int]:
    """Read sizes that Dynamo passes as numbers from tensors; the placeholders of those made up."""
    carriers = {}
    inputs = list(program.placeholders("input"))
    for node, i in places.items():
        value = node.meta["val"]
        if not isinstance(value, torch.SymInt) or not node.users:
            continue
        source = next(((n, d) for n in inputs for d in _dims_of(n, sym_expr(value))), None)
        if source is None:
            with program.graph.inserting_before(node):
                carrier = program.graph.placeholder(f"size_{i}")
            with program.extra["fake_mode"]:
                carrier.meta = {**node.meta, "val": torch.empty((1, value), dtype=torch.uint8)}
            program.leaves[carrier.name] = Leaf("input", carrier.name)
            carriers[carrier.name] = i
            source = carrier, CARRIER
        _sort_placeholders(program)
        after = list(program.graph.find_nodes(op="placeholder"))[-1]
        with program.graph.inserting_after(after):
            size = program.graph.call_function(aten.sym_size.int, source)
        size.meta = {**node.meta, "val": value}
        node.replace_all_uses_with(size)
    return carriers


def _dims_of(node: fx.Node, expr: Any) -> list[int]:
    if not isinstance(expr, sympy.Symbol):
        return []
    shape = node.meta["val"].shape
    return [d for d, n in enumerate(shape) if isinstance(n, torch.SymInt) and sym_expr(n) == expr]


def _remove_unread(program: Program) -> None:
    """Numbers that nothing reads any more, such as floats that became part of the graph."""
    for node in reversed(list(program.graph.nodes)):
        number = not isinstance(node.meta.get("val"), (Tensor, tuple, list))
        unread = node.op in ("call_function", "placeholder") and not node.users
        if unread and (node.target is aten.item.default or (node.op == "placeholder" and number)):
            program.graph.erase_node(node)
    for node in program.graph.find_nodes(op="placeholder"):
        if node.name not in program.leaves and not node.users:
            program.graph.erase_node(node)


def _set_outputs(program: Program, values: Sequence[Any]) -> tuple[Any, ...]:
    """Leave tensors as the program's outputs; what each output of Dynamo's graph is."""
    output = program.output()
    flat = arguments(output)[0]
    flat = list(flat) if isinstance(flat, (tuple, list)) else [flat]
    tensors, found = [], []
    for each in flat:
        value = each.meta["val"] if isinstance(each, fx.Node) else each
        if isinstance(value, Tensor):
            tensors.append(each)
            found.append(None)
        else:
            found.append(_number(value, values))
    output.args = (tuple(tensors),)
    program.n_outputs = len(tensors)
    return tuple(found)


def _number(value: Any, values: Sequence[Any]) -> Callable[..., Any]:
    """A function of Dynamo's arguments that gives an output that is no tensor."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return lambda *args: value
    where = {
        sym_expr(v): f"args[{i}]"
        for i, v in enumerate(values)
        if isinstance(v, torch.SymInt) and isinstance(sym_expr(v), sympy.Symbol)
    }
    functions: dict[str, Any] = {"max": max, "min": min}
    return eval(f"lambda *args: {python_text(sym_expr(value), where, functions)}", functions)


def _set_symbols(program: Program) -> None:
    shapes = {}
    for node in program.placeholders("input"):
        shape = node.meta["val"].shape
        shapes[node.name] = tuple(sym_expr(n) if isinstance(n, torch.SymInt) else n for n in shape)
        for dim, size in enumerate(shapes[node.name]):
            if isinstance(size, sympy.Symbol):
                program.symbols.setdefault(size, (node.name, dim))
    program.extra["input_shapes"] = shapes
    guards = shape_guards(program.extra["fake_mode"])
    program.guards = [
        g
        for g in guards
        if getattr(g, "free_symbols", None) and g.free_symbols <= set(program.symbols)
    ]
