"""Start collectives as early and wait for them as late as data allows."""

import operator
from typing import Any

import torch
from torch import fx
from tpcompile.passes.insert_collectives import Conversion

from tpcompile import collectives
from tpcompile.covered import Covered
from tpcompile.pending import start, wait
from tpcompile.pipelining import Lane
from tpcompile.predict import op_seconds
from tpcompile.problem import Assignment
from tpcompile.program import Program, values
from tpcompile.torch_private import OpOverload
from tpcompile.work import Work

_WORTH = 0.05
"""Part of a collective that must be hidden for two calls to be better than one."""
_SPLIT = (
    collectives.copy,
    collectives.all_reduce,
    collectives.reduce_scatter,
    collectives.all_gather,
    collectives.split,
    collectives.all_to_all,
)


def overlap_collectives(program: Program) -> Program:
    """Split a collective in two where independent work of its block can run between the halves.

    Before:  %r = all_reduce(%y)   %z = add(%x, %r)   %m = linear(%x, %w)
    After:   %s = start(all_reduce, %y)   %m = linear(%x, %w)   %r = wait(%s)   %z = add(%x, %r)

    What comes later and does not need the result moves up, until the collective is covered.  Ops
    that draw random numbers stay in their order.  Sets `program.extra["covered"]`: a `Covered`
    for each collective in each direction.
    """
    schedule = _Schedule(program)
    found: list[Covered] = []
    for node in list(program.calls()):
        if "lanes" in node.meta:
            found += _fused(node)
        elif "bucket" in node.meta:
            found.append(_bucket(node, schedule))
        elif "conversion" in node.meta:
            found += _apart(node, schedule)
    program.extra["covered"] = found
    return program


class _Schedule:
    """Which nodes may run beside which, and how long they take."""

    def __init__(self, program: Program) -> None:
        self.program, self.cost = program, program.extra["cost"]
        self.plan: Assignment = program.extra["assignment"]
        self.trained: set[fx.Node] = program.extra["facts"].trained
        self._seconds: dict[fx.Node, float] = {}

    def seconds(self, node: fx.Node) -> float:
        """Forward seconds of a call; zero for views and for what is no ATen op."""
        if node not in self._seconds:
            self._seconds[node] = self._price(node)
        return self._seconds[node]

    def _price(self, node: fx.Node) -> float:
        if "lanes" in node.meta:
            lanes: dict[str, Lane] = node.meta["lanes"]
            return next(iter(lanes.values())).multiply()
        if not isinstance(node.target, OpOverload) or "rule" not in node.meta or not values(node):
            return 0.0
        work = Work(node, node.meta["rule"], self.cost, trained=False)
        return 0.0 if work.is_view else op_seconds(work, self.plan.strategies.get(node), self.plan)

    def between(self, node: fx.Node, wanted: float) -> list[fx.Node]:
        """Nodes of its block that can run between the halves of a collective, in order.

        Those that stand between it and its first reader, and later ones that need nothing that is
        not ready by then, until they take the wanted seconds.
        """
        first = min(node.users)
        block = node.meta.get("block")
        waiting: set[fx.Node] = {node}
        found: list[fx.Node] = []
        total, each = 0.0, node.next
        while each.op == "call_function":
            late = not each < first
            if late and (total >= wanted or each.meta.get("block") != block):
                break
            needs_it = any(source in waiting for source in each.all_input_nodes)
            if needs_it or (late and not _may_move(each)):
                waiting.add(each)
            elif each.meta.get("block") == block:
                found.append(each)
                total += self.seconds(each)
            each = each.next
        return found


def _may_move(node: fx.Node) -> bool:
    """Whether a node can run earlier: random numbers and collectives keep their order."""
    target = node.target
    if target is operator.getitem:
        return True
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    if target is torch.ops.aten.scaled_dot_product_attention.default:
        dropout = node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)
        return not dropout
    return "dropout" not in str(target)


def _apart(node: fx.Node, schedule: _Schedule) -> list[Covered]:
    """Split the collective where that hides some of it."""
    what: Conversion = node.meta["conversion"]
    kinds = {"forward": what.step.forward}
    if what.value.trained:
        kinds["backward"] = what.step.backward
    kinds = {way: kind for way, kind in kinds.items() if kind}
    if not kinds:
        return []
    times = {w: schedule.cost.collective(k, what.value.nbytes) for w, k in kinds.items()}
    hidden, beside = dict.fromkeys(kinds, 0.0), ""
    if node.target in _SPLIT and node.users and not schedule.program.is_parameter(node.args[0]):
        work = schedule.between(node, max(times.values()))
        trained = [each for each in work if each in schedule.trained]
        covers = {
            "forward": sum(map(schedule.seconds, work)),
            "backward": 2 * sum(map(schedule.seconds, trained)),
        }
        if any(covers[way] > _WORTH * seconds for way, seconds in times.items()):
            _split(schedule.program, node, work)
            hidden = {way: min(seconds, covers[way]) for way, seconds in times.items()}
            beside = _named(work, schedule)
    return [
        _entry(node, kinds[way], way, times[way], hidden[way], beside if hidden[way] else "")
        for way in kinds
    ]


def _split(program: Program, node: fx.Node, work: list[fx.Node]) -> None:
    reader = min(node.users)
    for each in work:
        if not each < reader:
            reader.prepend(each)
    with program.graph.inserting_before(node):
        name = node.target.__name__  # type: ignore[union-attr]
        first = program.graph.call_function(start, (name, *node.args), dict(node.kwargs))
    first.meta.update({k: v for k, v in node.meta.items() if k != "conversion"})
    source: Any = node.args[0]
    first.meta.update({k: source.meta[k] for k in ("val", "dims", "states") if k in source.meta})
    node.target, node.args, node.kwargs = wait, (first,), {}
    work[-1].append(node)


def _named(work: list[fx.Node], schedule: _Schedule) -> str:
    """`linear, silu and 3 more`: the longest first."""
    busy = [node for node in work if schedule.seconds(node) > 0]
    names = [str(getattr(n.target, "__name__", n.target)).partition(".")[0] for n in busy]
    order = sorted(dict.fromkeys(names), key=lambda name: -_most(name, names, busy, schedule))
    more = len(order) - 2
    return ", ".join(order[:2]) + (f" and {more} more" if more > 0 else "")


def _most(name: str, names: list[str], busy: list[fx.Node], schedule: _Schedule) -> float:
    pairs = zip(names, busy, strict=True)
    return max(schedule.seconds(node) for other, node in pairs if other == name)


def _fused(node: fx.Node) -> list[Covered]:
    lanes: dict[str, Lane] = node.meta["lanes"]
    found = []
    for way, lane in lanes.items():
        chunks = node.meta["chunks"]
        beside = ["weight gradients"] if lane.beside else []
        beside += [f"{chunks} chunks"] if chunks > 1 else []
        sent = chunks * lane.send(chunks)
        found.append(
            _entry(node, lane.kind, way, sent, lane.hidden(chunks), ", ".join(beside), lane.nbytes)
        )
    return found


def _bucket(node: fx.Node, schedule: _Schedule) -> Covered:
    nbytes = float(sum(what.value.nbytes for what in node.meta["bucket"]))
    seconds = schedule.cost.collective("all_reduce", nbytes)
    return _entry(node, "all_reduce", "backward", seconds, 0.0, "", nbytes)


def _entry(
    node: fx.Node,
    kind: str,
    way: str,
    seconds: float,
    hidden: float,
    beside: str,
    nbytes: float | None = None,
) -> Covered:
    if nbytes is None:
        nbytes = float(node.meta["conversion"].value.nbytes)
    path = node.meta.get("path", "")
    return Covered(node.name, kind, way, path, nbytes, seconds, hidden, beside)
