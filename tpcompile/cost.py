"""Seconds: what an op, a conversion and a resident byte cost under a placement."""

import math
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from tpcompile.hardware import Hardware
from tpcompile.profiles import DEFAULT

_ROUNDS = {"all_reduce": 2}
"""How often a collective goes round the ring; others once."""


@dataclass(frozen=True)
class CostModel:
    """Prices on one hardware profile for one degree."""

    size: int
    hardware: Hardware = DEFAULT
    weight_byte: float = 2e-9
    """Seconds a resident byte of a weight matrix is worth: it decides that weights are sharded
    where they can be, as the user who asks for tensor parallelism wants."""
    state_factor: float = 4.0
    """Resident bytes per byte of a trained parameter: itself, its gradient, two Adam moments."""
    activation_byte: float = 1e-12
    """Seconds a byte that is kept for the backward pass is worth: a quarter of what computing a
    transformer block of width 4096 again would take per byte it frees (24 h^2 FLOPs for 34 h
    bytes a token, at 600 TFLOP/s), as most bytes do fit."""
    output_byte: float = 0.0
    """Seconds any byte of an op's output is worth, kept or not: sequence_parallel=True."""
    split_light: bool = True
    """Whether ops without a matmul get cheaper by being split: not where the user does not want
    sequence parallelism, so that nothing but weights decides."""

    def collective(self, kind: str, nbytes: float) -> float:
        """Seconds of one collective over a value of `nbytes` (whole, on one device).

        Ring volumes per rank: all-reduce 2(t-1)/t of the bytes, all-gather and reduce-scatter
        (t-1)/t, all-to-all (t-1)/t^2 (Thakur, Rabenseifner, Gropp 2005, section 4).
        """
        return self.latency(kind) + self.volume(kind, nbytes)

    def latency(self, kind: str) -> float:
        """Seconds of one collective on an empty tensor."""
        if self.size == 1:
            return 0.0
        return self.hardware.latency(self.size, _ROUNDS.get(kind, 1))

    def volume(self, kind: str, nbytes: float) -> float:
        """Seconds of one collective beside its latency."""
        moved = nbytes * (self.size - 1) / self.size
        sent = {"all_reduce": 2 * moved, "all_to_all": moved / self.size}.get(kind, moved)
        return sent / self.hardware.bandwidth(self.size)

    def bucketed(self, nbytes: float) -> float:
        """Seconds a parameter's gradient adds to the all-reduce that a block's gradients share.

        Half a latency each: a block that has one such gradient has two, those of its norms.
        """
        return self.volume("all_reduce", nbytes) + self.latency("all_reduce") / 2

    def compute(
        self, flops: float, nbytes: float, dtype: torch.dtype, trained: bool, side: float = math.inf
    ) -> float:
        """Seconds of an op's forward and, where trained, backward (twice the forward's work).

        `side` is the smallest dim of its matmul.
        """
        moving = nbytes / self.hardware.memory_bandwidth
        once = self.hardware.launch
        once += max(flops / self.hardware.matmul_rate(dtype, side), moving)
        return once * (3 if trained else 1)

    def kept(self, nbytes: float, trained: bool) -> float:
        """Seconds that an op's local output bytes are worth, beside the time to move them."""
        return nbytes * (self.output_byte + (self.activation_byte if trained else 0.0))

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
