"""What one call computes and moves, whole or on one rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod

import torch
from torch import fx

from tpcompile.aliasing import lies_in_operand
from tpcompile.cost import CostModel, bytes_of, hint, ticks
from tpcompile.program import operands, values
from tpcompile.rule import Rule, Spec, factors_of

_VIEW_SHARE = 1e-3
"""Of a copy's time, what a view costs: nothing on a device, but a smaller one is still better."""


@dataclass(frozen=True)
class Sides:
    """The dims of a matmul: rows and columns of its output, and the contracted one."""

    rows: float
    columns: float
    depth: float

    def split(self, fraction: float, left: bool, right: bool, out: bool) -> "Sides":
        """With the dim that the marked tensors have at a fraction."""
        if left and right:
            return self if out else Sides(self.rows, self.columns, self.depth * fraction)
        if left:
            return Sides(self.rows * fraction, self.columns, self.depth)
        return Sides(self.rows, self.columns * fraction, self.depth) if right else self

    def smallest(self) -> float:
        """Which dim limits the rate (see `Hardware.efficiency`)."""
        return min(self.rows, self.columns, self.depth)


class Work:
    """FLOPs and bytes of one call, for pricing its strategies and predicting its time."""

    def __init__(self, node: fx.Node, rule: Rule | None, cost: CostModel, trained: bool) -> None:
        self.cost, self.trained = cost, trained
        self.flops = flops_of(node, rule)
        self.reduces = rule is not None and bool(rule.inner)
        """Whether a split op talks to the other ranks itself, as a loss over a vocabulary does."""
        self.ins = [bytes_of(n.meta["val"]) for n in operands(node)]
        outs = values(node)
        self.outs = [bytes_of(v) for v in outs]
        self.dtype: torch.dtype = outs[0].dtype
        inputs = operands(node)
        self.is_view = bool(inputs) and lies_in_operand(node, inputs[0])
        self.contraction = _contraction(node, rule) if self.flops else None

    def seconds(self, fraction: float, has_in: Sequence[bool], has_out: Sequence[bool]) -> float:
        """Of forward and backward, with the marked operands and outputs at a fraction."""
        ins = sum(b * fraction if h else b for b, h in zip(self.ins, has_in, strict=True))
        outs = sum(b * fraction if h else b for b, h in zip(self.outs, has_out, strict=True))
        if self.is_view:
            return _VIEW_SHARE * (ins + outs) / self.cost.hardware.memory_bandwidth
        side = inf
        if self.contraction is not None:
            (left, right), sides = self.contraction
            sides = sides.split(fraction, has_in[left], has_in[right], has_out[0])
            side = sides.smallest()
        flops = self.flops * fraction
        return self.cost.compute(flops, ins + outs, self.dtype, self.trained, side)

    def ticks(self, fraction: float, has_in: Sequence[bool], has_out: Sequence[bool]) -> float:
        """Picoseconds, what the outputs that stay in memory are worth included."""
        if not (self.flops or self.reduces or self.cost.split_light):
            fraction = 1.0
        outs = sum(b * fraction if h else b for b, h in zip(self.outs, has_out, strict=True))
        # A partial sum is reduced at once: what stays in memory is what it is reduced to.
        kept = sum(self.outs) * fraction if fraction < 1 else outs
        price = self.cost.kept(0.0 if self.is_view else kept, self.trained)
        return ticks(self.seconds(fraction, has_in, has_out) + price)

    def partial_ticks(self) -> float:
        """Picoseconds where partial sums go in and out.

        Asked for sequence parallelism, what stays in memory of them is what they are scattered to.
        """
        whole = self.ticks(1.0, (False,) * len(self.ins), (False,) * len(self.outs))
        scattered = 0 if self.is_view else sum(self.outs) * (1 - 1 / self.cost.size)
        return whole - ticks(scattered * self.cost.output_byte)

    def inner_bytes(self) -> float:
        """Bytes of what a rewrite that reduces by itself sends: a few numbers a row."""
        return float(max(self.outs[0], 4))


def flops_of(node: fx.Node, rule: Rule | None) -> float:
    """Multiply-adds of a call times two; zero for ops that only move or map elements."""
    if rule is None:
        return 0.0
    tensors = [n.meta["val"] for n in operands(node)]
    outs = values(node)
    if _is_attention(node):
        return 4.0 * prod(map(hint, tensors[0].shape)) * hint(tensors[1].shape[-2])
    contracted = rule.contracted() - rule.whole
    if len(tensors) < 2 or not contracted or not all(t.is_floating_point() for t in tensors):
        return 0.0
    sizes = _sizes(node, rule)
    return 2.0 * prod(map(hint, outs[0].shape)) * prod(sizes.get(f, 1) for f in contracted)


def _is_attention(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.scaled_dot_product_attention.default


def _sizes(node: fx.Node, rule: Rule) -> dict[str, int]:
    """Sizes of the factors that are a dim of an operand by themselves."""
    found = {}
    for spec, source in zip(rule.ins, operands(node), strict=True):
        for dim, size in zip(spec, source.meta["val"].shape, strict=True):
            if len(dim) == 1 and len(dim[0]) == 1:
                found[dim[0][0]] = hint(size)
    return found


def _contraction(node: fx.Node, rule: Rule | None) -> tuple[tuple[int, int], Sides] | None:
    """(the two operands that are contracted, their sides); None for what is not one matmul.

    Attention runs as one kernel whose tiles lie along the sequences.
    """
    if rule is None:
        return None
    if _is_attention(node):
        q, k = (n.meta["val"].shape for n in operands(node)[:2])
        return (0, 1), Sides(hint(q[-2]), hint(k[-2]), inf)
    both = [i for i, spec in enumerate(rule.ins) if factors_of([spec]) & rule.contracted()]
    if len(both) != 2:
        return None
    left, right = (factors_of([rule.ins[i]]) for i in both)
    shapes = [operands(node)[i].meta["val"].shape for i in both]
    specs = [rule.ins[i] for i in both]
    rows = _extent(specs[0], shapes[0], left - right)
    columns = _extent(specs[1], shapes[1], right - left)
    return (both[0], both[1]), Sides(rows, columns, _extent(specs[0], shapes[0], rule.contracted()))


def _extent(spec: Spec, shape: Sequence[object], factors: set[str]) -> float:
    """Product of the dims made of these factors alone."""
    return float(
        prod(
            hint(size)
            for dim, size in zip(spec, shape, strict=True)
            if {f for term in dim for f in term} <= factors
        )
    )
