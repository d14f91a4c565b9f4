"""Run linears and the collective next to them as one call, so that the two can overlap."""

import operator
from typing import Any

import torch
from torch import Tensor, fx
from tpcompile.passes.insert_collectives import Conversion

from tpcompile import collectives
from tpcompile.cost import CostModel
from tpcompile.parallel_linear import column_parallel, row_parallel
from tpcompile.pipelining import Lane, best_chunks, lane_of
from tpcompile.placement import COPY, GATHER_STAR
from tpcompile.program import Program

_LINEAR = torch.ops.aten.linear.default


def fuse_linears(program: Program) -> Program:
    """Join a copy or gather with the linears that read it, and a linear with its reduction.

    Before:  %g = all_gather(%x)   %q = linear(%g, %wq)   %k = linear(%g, %wk)
    After:   %c = column_parallel(%x, [%wq, %wk])   %q = %c[0]   %k = %c[1]

    Before:  %y = linear(%x, %w)   %r = reduce_scatter(%y)
    After:   %r = row_parallel(%x, %w, chunks=4)             (with more than one chunk only)

    `program.extra["overlap_chunks"]` says in how many chunks each runs.  The new calls have their
    directions with traffic in `meta["lanes"]`.
    """
    for node in list(program.calls(collectives.all_reduce, collectives.reduce_scatter)):
        linear = node.args[0]
        if isinstance(linear, fx.Node) and _reduces_linear(linear, node):
            _fuse_row(program, linear, node)
    for node in list(program.calls(collectives.copy, collectives.all_gather)):
        linears = _linears_of(node)
        if linears:
            _fuse_column(program, node, linears)
    return program


def _is_linear(node: fx.Node) -> bool:
    if node.target is not _LINEAR or node.kwargs:
        return False
    x, weight = (arg.meta["val"] for arg in node.args[:2])  # type: ignore[union-attr]
    return x.ndim > 1 and weight.ndim == 2 and x.is_floating_point()


def _reduces_linear(linear: fx.Node, node: fx.Node) -> bool:
    alone = list(linear.users) == [node] and linear.meta.get("block") == node.meta.get("block")
    return alone and _is_linear(linear) and (len(linear.args) < 3 or linear.args[2] is None)


def _fuse_row(program: Program, linear: fx.Node, node: fx.Node) -> None:
    what: Conversion = node.meta["conversion"]
    cost: CostModel = program.extra["cost"]
    nbytes = float(what.value.nbytes)
    lanes = {"forward": lane_of([linear], what.step.forward, nbytes, cost, row=True, beside=False)}
    if what.step.backward and what.value.trained:
        back = lane_of([linear], what.step.backward, nbytes, cost, row=True, beside=False)
        lanes["backward"] = back
    chunks = _chunks(program, lanes)
    if chunks == 1:  # apart, a checkpoint's second forward can stop before the last collective
        return
    layout = tuple(node.args[2:]) or None
    args = (*linear.args[:2], program.extra["axis"], layout)
    with program.graph.inserting_before(node):
        fused = program.graph.call_function(row_parallel, args, _asked(chunks=chunks))
    fused.meta.update(_place(linear), **_value(node))
    fused.meta.update(fused=what, lanes=lanes, chunks=chunks)
    node.replace_all_uses_with(fused)
    for old in (node, linear):
        program.graph.erase_node(old)


def _linears_of(node: fx.Node) -> list[fx.Node]:
    """The linears of a converted value that can run where its first reader stands."""
    if node.meta["conversion"].step not in (COPY, GATHER_STAR) or not node.users:
        return []
    first = min(node.users)
    found = []
    for user in sorted(node.users):
        same = user.meta.get("block") == node.meta.get("block")
        if same and _is_linear(user) and user.args[0] is node:
            late = _late(user.args[1:], first)
            if not any(_depends(each, node) for each in late):
                _raise(late, first)
                found.append(user)
    return found


def _late(args: Any, before: fx.Node) -> list[fx.Node]:
    """What the arguments are computed from that stands at `before` or later, in order."""
    found: set[fx.Node] = set()
    pending = [arg for arg in args if isinstance(arg, fx.Node)]
    while pending:
        node = pending.pop()
        if node.op != "placeholder" and not node < before and node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return sorted(found)


def _depends(node: fx.Node, source: fx.Node) -> bool:
    """Whether a node reads `source`, or is of another block."""
    return source in node.all_input_nodes or node.meta.get("block") != source.meta.get("block")


def _raise(nodes: list[fx.Node], before: fx.Node) -> None:
    for node in nodes:
        before.prepend(node)


def _fuse_column(program: Program, node: fx.Node, linears: list[fx.Node]) -> None:
    what: Conversion = node.meta["conversion"]
    cost: CostModel = program.extra["cost"]
    nbytes, step = float(what.value.nbytes), what.step
    lanes: dict[str, Lane] = {}
    if step.forward:
        lanes["forward"] = lane_of(linears, step.forward, nbytes, cost, row=False, beside=False)
    if step.backward and what.value.trained:
        lanes["backward"] = lane_of(linears, step.backward, nbytes, cost, row=False, beside=True)
    chunks = _chunks(program, lanes)
    keep = any(user not in linears for user in node.users)
    weights = [linear.args[1] for linear in linears]
    biases = [linear.args[2] if len(linear.args) > 2 else None for linear in linears]
    layout = tuple(node.args[2:]) or None
    args = (node.args[0], program.extra["axis"], layout, weights)
    asked = _asked(biases=biases if any(biases) else (), keep=keep, chunks=chunks)
    outs = [node, *linears] if keep else linears
    with program.graph.inserting_before(min(node.users)):
        fused = program.graph.call_function(column_parallel, args, asked)
        items = [
            program.graph.call_function(operator.getitem, (fused, i)) for i in range(len(outs))
        ]
    values = [_value(out) for out in outs]
    fused.meta.update(_place(linears[0]), fused=what, lanes=lanes, chunks=chunks)
    fused.meta["val"] = tuple(v["val"] for v in values)
    fused.meta["dims"] = [v["dims"][0] for v in values]
    fused.meta["states"] = [state for v in values for state in v["states"]]
    for old, item, value in zip(outs, items, values, strict=True):
        item.meta.update(_place(old), **value)
        old.replace_all_uses_with(item)
    for old in (*linears, node):
        program.graph.erase_node(old)


def _chunks(program: Program, lanes: dict[str, Lane]) -> int:
    asked: int | str = program.extra.get("overlap_chunks", 1)
    if asked != "auto":
        return int(asked)
    chunks = best_chunks(list(lanes.values()))
    if chunks > 1:
        kinds = " and ".join(lane.kind for lane in lanes.values())
        once, now = (sum(lane.together(n) for lane in lanes.values()) for n in (1, chunks))
        note = (
            f"{kinds} beside linears in {chunks} chunks: "
            f"predicted {now * 1e6:.1f} us instead of {once * 1e6:.1f}"
        )
        if note not in program.notes:  # ranks that are planned together share the list
            program.notes.append(note)
    return chunks


def _asked(**kwargs: Any) -> dict[str, Any]:
    """The keyword arguments that are not the defaults."""
    defaults = {"biases": (), "keep": False, "chunks": 1}
    return {key: value for key, value in kwargs.items() if value != defaults[key]}


def _place(node: fx.Node) -> dict[str, Any]:
    kept = ("path", "where", "modules", "calls", "block", "weighed")
    return {key: node.meta[key] for key in kept if key in node.meta}


def _value(node: fx.Node) -> dict[str, Any]:
    val = node.meta["val"]
    assert isinstance(val, Tensor)
    found = {"val": val, "dims": node.meta["dims"]}
    return found | {"states": list(node.meta["states"]) if "states" in node.meta else []}
