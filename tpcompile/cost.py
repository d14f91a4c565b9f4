"""Seconds: what an op, a conversion and a resident byte cost under a placement."""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from tpcompile.hardware import DEFAULT, Hardware
from tpcompile.program import operands, values
from tpcompile.rule import Rule


@dataclass(frozen=True)
class CostModel:
    """Prices on one hardware profile for one degree."""

    size: int
    hardware: Hardware = DEFAULT
    weight_byte: float = 1e-9
    """Seconds a resident byte of a weight matrix is worth: it decides that weights are sharded
    where they can be, as the user who asks for tensor parallelism wants."""
    state_factor: float = 4.0
    """Resident bytes per byte of a trained parameter: itself, its gradient, two Adam moments."""
    activation_byte: float = 0.0
    """Seconds a byte of an op's local output is worth, beside the time to move it."""

    def collective(self, kind: str, nbytes: float) -> float:
        """Seconds of one collective over a value of `nbytes` (whole, on one device).

        Ring volumes per rank: all-reduce 2(t-1)/t of the bytes, all-gather and reduce-scatter
        (t-1)/t, all-to-all (t-1)/t^2 (Thakur, Rabenseifner, Gropp 2005, section 4).
        """
        if self.size == 1:
            return 0.0
        moved = nbytes * (self.size - 1) / self.size
        volume = {"all_reduce": 2 * moved, "all_to_all": moved / self.size}.get(kind, moved)
        return self.hardware.latency + volume / self.hardware.link_bandwidth

    def bucketed(self, nbytes: float) -> float:
        """Seconds a parameter's gradient adds to a bucketed all-reduce: volume only."""
        moved = 2 * nbytes * (self.size - 1) / self.size
        return moved / self.hardware.link_bandwidth

    def compute(self, flops: float, nbytes: float, dtype: torch.dtype, trained: bool) -> float:
        """Seconds of an op's forward and, where trained, backward (twice the forward's work)."""
        once = max(flops / self.hardware.matmul_rate(dtype), nbytes / self.hardware.memory_bandwidth)
        return once * (3 if trained else 1)

    def resident(self, nbytes: float, ndim: int, trained: bool) -> float:
        """Seconds a parameter's local bytes are worth."""
        factor = self.state_factor if trained else 1.0
        # Vectors cost only the optimizer's traffic, so that a norm's gain is not worth traffic.
        price = self.weight_byte if ndim >= 2 else 1 / self.hardware.memory_bandwidth
        return nbytes * factor * price


def ticks(seconds: float) -> float:
    """Whole picoseconds, so that sums are exact in float64 and equal plans cost the same.

    >>> ticks(1.5e-12)
    2.0
    """
    return float(round(seconds * 1e12)) if seconds != float("inf") else seconds


def hint(size: Any) -> int:
    """The example value of a size; 1 where it depends on data."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(size.node.hint) if size.node.has_hint() else 1


def bytes_of(value: Tensor) -> int:
    """Bytes of a fake tensor, symbolic sizes at their example values."""
    return prod(map(hint, value.shape)) * value.dtype.itemsize


def flops_of(node: fx.Node, rule: Rule | None) -> float:
    """Multiply-adds of a call times two; zero for ops that only move or map elements."""
    if rule is None:
        return 0.0
    tensors = [n.meta["val"] for n in operands(node)]
    outs = values(node)
    if node.target is torch.ops.aten.scaled_dot_product_attention.default:
        return 4.0 * prod(map(hint, tensors[0].shape)) * hint(tensors[1].shape[-2])
    contracted = rule.contracted() - rule.whole
    if len(tensors) < 2 or not contracted or not all(t.is_floating_point() for t in tensors):
        return 0.0
    depth = {}
    for spec, tensor in zip(rule.ins, tensors, strict=True):
        for dim, size in zip(spec, tensor.shape, strict=True):
            if len(dim) == 1 and len(dim[0]) == 1 and dim[0][0] in contracted:
                depth[dim[0][0]] = hint(size)
    return 2.0 * prod(map(hint, outs[0].shape)) * prod(depth.values())
