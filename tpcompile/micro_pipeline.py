"""Which collectives Inductor's micro-pipelined tensor parallelism would fuse with their matmuls.

With `_micro_pipeline_tp` and symmetric memory, Inductor turns an all-gather and the matmuls of its
result into one kernel that multiplies the chunks that have arrived, and a matmul and the
reduce-scatter of its result into one that sends the chunks that are done.  It says nothing of those
that it does not recognise.  Here its own matcher looks at the graphs, which takes no GPU.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from tpcompile import pipeline
from tpcompile.clone import clone
from tpcompile.cost import hint
from tpcompile.program import Program
from tpcompile.quiet import quiet
from tpcompile.stages import Source, program_of
from tpcompile.torch_private import (
    FakeTensorMode,
    functional_collectives,
    gather_matches,
    post_grad_graphs,
    scatter_matches,
)

aten = torch.ops.aten
_GATHER = functional_collectives.all_gather_into_tensor.default
_SCATTER = functional_collectives.reduce_scatter_tensor.default
_WAIT = functional_collectives.wait_tensor.default
_MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
_MOVES = ("reshape", "view", "permute", "transpose", "split", "split_with_sizes", "slice", "cat")
_MOVES += ("getitem", "clone", "wait_tensor", "unsqueeze", "squeeze", "convert_element_type")
KINDS = ("all_gather+matmul", "matmul+reduce_scatter")


@dataclass(frozen=True)
class Pair:
    """A collective next to a matmul."""

    kind: str
    """One of `KINDS`."""
    direction: str
    """forward or backward."""
    path: str
    """Of the module it is for."""
    reason: str
    """Why it is not fused; "" where it is."""

    @property
    def fusable(self) -> bool:
        """Whether the matcher takes it."""
        return not self.reason


@dataclass(frozen=True)
class Readiness:
    """What the matcher makes of a model's forward and backward graph."""

    pairs: tuple[Pair, ...]
    alone: tuple[str, ...]
    """Gathers and scatters that have no matmul beside them: direction and kind of each."""

    def count(self, kind: str, direction: str = "forward") -> tuple[int, int]:
        """(fusable, all) of a kind in a direction."""
        found = [p for p in self.pairs if (p.kind, p.direction) == (kind, direction)]
        return sum(p.fusable for p in found), len(found)

    def __str__(self) -> str:
        lines = [f"fusable {self._counts('forward')}"]
        if any(p.direction == "backward" for p in self.pairs):
            lines.append(f"backward {self._counts('backward')}")
        missed = Counter(
            (p.kind, p.direction, p.reason) for p in self.pairs if not p.fusable
        ).most_common()
        lines += [f"not fused: {n} x {way} {kind}: {why}" for (kind, way, why), n in missed]
        lines += [f"no matmul beside: {n} x {what}" for what, n in Counter(self.alone).items()]
        return "\n".join(lines)

    def _counts(self, direction: str) -> str:
        counts = ((kind, self.count(kind, direction)) for kind in KINDS)
        return ", ".join(f"{kind} {some}/{everything}" for kind, (some, everything) in counts)


def micro_pipeline(source: Source) -> Readiness:
    """How many collectives Inductor can run chunk by chunk inside of their matmuls.

    Traces what rank 0 runs for the example's sizes, with Inductor's passes up to the one in
    question; no process group, weights or GPU are needed.

    Args:
        source: A sharded model, or what `stages` or `explain` returned.
    """
    program = clone(program_of(source))
    program.extra["overlap_chunks"] = 1
    pipeline.local(program, ("tp", program.extra["cost"].size, 0))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    inputs = _inputs(program, mode)
    for node in program.calls():
        node.meta["custom"] = {"path": node.meta.get("path", "")}
        # A model without weights is on the meta device, for which Inductor has other passes.
        if isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
    module = fx.GraphModule(nn.Module(), program.graph)
    pairs: list[Pair] = []
    alone: list[str] = []
    with quiet():  # what Inductor imports is deprecated in part
        graphs = post_grad_graphs(module, inputs, mode)
    for is_backward, graph in graphs:
        way = "backward" if is_backward else "forward"
        _look(graph, way, pairs, alone)
    return Readiness(tuple(pairs), tuple(alone))


def _inputs(program: Program, mode: Any) -> list[torch.Tensor]:
    """What one rank's graph takes, at the example's sizes, without data."""
    layouts, trained = program.extra["layouts"], program.extra["facts"].trained
    found = []
    with mode:
        for node in program.placeholders():
            val, leaf = node.meta["val"], program.leaves[node.name]
            shape = [hint(size) for size in val.shape]
            if leaf.kind == "parameter" and layouts[leaf.name].dim is not None:
                layout = layouts[leaf.name]
                shape[layout.dim] = layout.real_length(0)
            fake = torch.empty(shape, dtype=val.dtype)
            found.append(fake.requires_grad_(node in trained))
    return found


def _look(graph: fx.Graph, way: str, pairs: list[Pair], alone: list[str]) -> None:
    gathers, scatters = gather_matches(graph), scatter_matches(graph)
    for node in graph.nodes:
        if node.target is _GATHER:
            matmuls, _ = _reach(node, lambda n: n.users)
            if matmuls:
                reason = _gather_reason(node, gathers, matmuls)
                pairs.append(Pair(KINDS[0], way, _path(node), reason))
            else:
                alone.append(f"{way} all_gather")
        elif node.target is _SCATTER:
            matmuls, sums = _reach(node, lambda n: n.all_input_nodes, adds=True)
            if matmuls:
                reason = _scatter_reason(node, scatters, matmuls, sums)
                pairs.append(Pair(KINDS[1], way, _path(node), reason))
            else:
                alone.append(f"{way} reduce_scatter")


def _reach(
    node: fx.Node, step: Callable[[fx.Node], Iterable[fx.Node]], adds: bool = False
) -> tuple[list[fx.Node], int]:
    """Matmuls that a value comes from or goes to by views and moves, and sums on the way."""
    found: list[fx.Node] = []
    seen, pending, sums = {node}, list(step(node)), 0
    while pending:
        each = pending.pop()
        if each in seen or each.op != "call_function":
            continue
        seen.add(each)
        name = str(getattr(each.target, "__name__", each.target)).partition(".")[0]
        if each.target in _MATMULS:
            found.append(each)
            if adds and each.target is aten.addmm.default:  # a sum, where it adds a matmul
                sums, pending = sums + 1, [*pending, *each.all_input_nodes[:1]]
        elif name in _MOVES or (adds and name == "add"):
            sums += name == "add"
            pending += step(each)
    return found, sums


def _gather_reason(node: fx.Node, matches: dict[fx.Node, list[Any]], matmuls: list[fx.Node]) -> str:
    if node not in matches:
        return "the gathered chunks are not put together along one dim in equal parts"
    if matches[node]:
        return ""
    names = _names(matmuls)
    if names == ["mm"]:
        return "no mm has the result, in its own shape or in rows, as its left operand"
    return f"read by {', '.join(names)}, not by mm"


def _scatter_reason(
    node: fx.Node, matches: dict[fx.Node, Any], matmuls: list[fx.Node], sums: int
) -> str:
    if node not in matches:
        return "the scattered chunks are not cut along one dim in equal parts"
    if matches[node] is not None:
        return ""
    if sums and len(matmuls) > 1:
        return f"it scatters the sum of {len(matmuls)} matmuls"
    names = _names(matmuls)
    if names != ["mm"]:
        return f"made by {', '.join(names)}, not by mm"
    return "what it scatters is not an mm's own result, or something else reads that, too"


def _names(matmuls: list[fx.Node]) -> list[str]:
    return sorted({str(m.target).removeprefix("aten.").removesuffix(".default") for m in matmuls})


def _path(node: fx.Node) -> str:
    custom: dict[str, Any] = node.meta.get("custom") or {}
    return custom.get("path", "")
