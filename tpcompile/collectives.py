"""Conversions between placement states as differentiable functions, and their table.

A conversion moves one value on one mesh axis from a state to another; its backward pass is the
conversion back, of the gradient.  An axis of size 1 makes each of them the identity.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tpcompile import wire
from tpcompile.errors import TpcompileError
from tpcompile.layout import Segments
from tpcompile.local_group import Axis
from tpcompile.torch_private import is_batched
from tpcompile.vocab import sharded_dropout, vocab_cross_entropy, vocab_embedding
from tpcompile.wire import Layout

__all__ = [
    "COLLECTIVES",
    "Collective",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "copy",
    "copy_many",
    "pad",
    "reduce_scatter",
    "sharded_dropout",
    "split",
    "to_partial",
    "vocab_cross_entropy",
    "vocab_embedding",
]

State = Literal["R", "R*", "S", "P"]
"""R replicated; R* replicated, gradient Partial; S split; P Partial, gradient replicated."""
Move = Literal[
    "none", "all_reduce", "reduce_scatter", "all_gather", "take", "pad", "first", "all_to_all"
]
"""What happens to a tensor. Local are `take`, `pad` (own part, zeros elsewhere) and `first` (whole
on rank 0, zeros on the others)."""


@dataclass(frozen=True)
class Collective:
    """One way from a placement state to another."""

    name: str
    """The function of this module."""
    source: State
    target: State
    forward: Move
    backward: Move


COLLECTIVES: tuple[Collective, ...] = (
    Collective("copy", "R", "R*", "none", "all_reduce"),
    Collective("all_reduce", "P", "R", "all_reduce", "none"),
    Collective("reduce_scatter", "P", "S", "reduce_scatter", "all_gather"),
    Collective("all_gather", "S", "R*", "all_gather", "reduce_scatter"),
    Collective("all_gather", "S", "R", "all_gather", "take"),
    Collective("split", "R", "S", "take", "all_gather"),
    Collective("split", "R*", "S", "take", "pad"),
    Collective("all_to_all", "S", "S", "all_to_all", "all_to_all"),
    Collective("to_partial", "R", "P", "first", "none"),
    Collective("to_partial", "R*", "P", "first", "first"),
    Collective("pad", "S", "P", "pad", "take"),
)

_LOCAL: dict[Move, Callable[[Tensor, Axis, Any, Any], Tensor]] = {
    "none": lambda x, axis, source, target: x.view_as(x),
    "take": lambda x, axis, source, target: wire.take_own(x, axis, target),
    "pad": lambda x, axis, source, target: wire.pad_own(x, axis, source),
    "first": lambda x, axis, source, target: x.view_as(x) if axis[2] == 0 else torch.zeros_like(x),
}
_TRAFFIC: dict[Move, Callable[[Tensor, Axis, Any, Any], wire.Started]] = {
    "all_reduce": lambda x, axis, source, target: wire.start_all_reduce(x, axis),
    "reduce_scatter": lambda x, axis, source, target: wire.start_reduce_scatter(x, axis, target),
    "all_gather": lambda x, axis, source, target: wire.start_all_gather(x, axis, source),
    "all_to_all": wire.start_all_to_all,
}
"""How to make each move of a tensor split as `source` (None: not split) into one as `target`."""


@dataclass(frozen=True)
class Moves:
    """A conversion between layouts of one tensor: what moves forward and what moves backward."""

    forward: Move
    backward: Move
    source: Layout | None = None
    target: Layout | None = None

    def begin(self, x: Tensor, axis: Axis) -> wire.Started:
        """Start the forward move; one without traffic is complete at once."""
        return _begin(self.forward, x, axis, self.source, self.target)

    def begin_backward(self, grad: Tensor, axis: Axis) -> wire.Started:
        """Start the move of a gradient."""
        return _begin(self.backward, grad, axis, self.target, self.source)


def _begin(
    move: Move, x: Tensor, axis: Axis, source: Layout | None, target: Layout | None
) -> wire.Started:
    if move in _TRAFFIC:
        return _TRAFFIC[move](x, axis, source, target)
    return wire.Started(_LOCAL[move](x, axis, source, target), complete=True)


def copy(x: Tensor, axis: Axis) -> Tensor:
    """R -> R*: the same value for readers that return partial gradients, which are summed."""
    return convert(x, axis, moves_of("copy", x))


def copy_many(axis: Axis, *xs: Tensor) -> tuple[Tensor, ...]:
    """`copy` of several values whose gradients of one dtype are summed in one all-reduce."""
    return xs if axis[1] == 1 else _CopyMany.apply(axis, *xs)


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """P -> R: the sum over the ranks."""
    return convert(x, axis, moves_of("all_reduce", x))


def reduce_scatter(x: Tensor, axis: Axis, dim: int, segments: Segments) -> Tensor:
    """P -> S: this rank's part of the sum over the ranks."""
    return convert(x, axis, moves_of("reduce_scatter", x, dim, segments))


def all_gather(
    x: Tensor, axis: Axis, dim: int, segments: Segments, partial_grad: bool = True
) -> Tensor:
    """S -> R* (S -> R unless `partial_grad`): the global tensor from every rank's part."""
    return convert(x, axis, moves_of("all_gather", x, dim, segments, partial_grad))


def split(
    x: Tensor, axis: Axis, dim: int, segments: Segments, partial_grad: bool = False
) -> Tensor:
    """R -> S (R* -> S if `partial_grad`): this rank's part, without traffic."""
    return convert(x, axis, moves_of("split", x, dim, segments, partial_grad))


def all_to_all(
    x: Tensor, axis: Axis, dim: int, segments: Segments, to_dim: int, to_segments: Segments
) -> Tensor:
    """S -> S': the part split along `to_dim` of a value that is split along `dim`."""
    return convert(x, axis, moves_of("all_to_all", x, dim, segments, to_dim, to_segments))


def to_partial(x: Tensor, axis: Axis, partial_grad: bool = False) -> Tensor:
    """R -> P (R* -> P if `partial_grad`): counted once, by rank 0, without traffic.

    So a bias can be added to a partial sum, and the sum be reduced together with others.
    """
    return convert(x, axis, moves_of("to_partial", x, partial_grad))


def pad(x: Tensor, axis: Axis, dim: int, segments: Segments) -> Tensor:
    """S -> P: the parts, each with zeros elsewhere, without traffic.

    So a residual that is split can be added to partial sums, and all be reduced together.
    """
    return convert(x, axis, moves_of("pad", x, dim, segments))


def moves_of(name: str, x: Tensor, *layout: Any) -> Moves:
    """What the conversion of that name moves, for the arguments that follow its axis."""

    def at(i: int) -> Layout:
        return layout[i] % x.ndim, layout[i + 1]

    match name:
        case "copy":
            return Moves("none", "all_reduce")
        case "all_reduce":
            return Moves("all_reduce", "none")
        case "reduce_scatter":
            return Moves("reduce_scatter", "all_gather", target=at(0))
        case "all_gather":
            partial_grad = len(layout) < 3 or layout[2]
            return Moves("all_gather", "reduce_scatter" if partial_grad else "take", source=at(0))
        case "split":
            partial_grad = len(layout) > 2 and layout[2]
            return Moves("take", "pad" if partial_grad else "all_gather", target=at(0))
        case "all_to_all":
            return Moves("all_to_all", "all_to_all", at(0), at(2))
        case "to_partial":
            return Moves("first", "first" if layout and layout[0] else "none")
        case "pad":
            return Moves("pad", "take", source=at(0))
    raise AssertionError(name)


def convert(x: Tensor, axis: Axis, moves: Moves) -> Tensor:
    """The tensor after the forward move; differentiable."""
    if axis[1] == 1:
        return x
    return _Conversion.apply(x, axis, moves)


class _Conversion(torch.autograd.Function):
    """One move forward, its partner backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, moves: Moves) -> Tensor:
        ctx.axis, ctx.moves = axis, moves
        return moves.begin(x, axis).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        check_first_order(grads)
        return ctx.moves.begin_backward(grads[0], ctx.axis).wait(), None, None


def check_first_order(grads: Sequence[Tensor | None], saved: Sequence[Tensor | None] = ()) -> None:
    """Refuse gradients of gradients, and many at once: no state is known of those.

    `saved` is what the backward multiplies gradients with.
    """
    if torch.compiler.is_compiling():
        return
    second = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in saved)
    for grad in grads:
        if grad is not None and (second or grad.requires_grad or is_batched(grad)):
            raise TpcompileError(
                "differentiate a gradient of a sharded model, or batches of gradients",
                "only gradients of the first order, one at a time, are right across ranks",
                "compute such a term on an unsharded model, or without create_graph",
            )


class _CopyMany(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        # All ranks run one program, so a gradient that is missing is missing on all of them; it
        # stays None, as on one device, where an optimizer then leaves the parameter alone.
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        check_first_order(grads)
        summed: list[Tensor | None] = [None] * len(grads)
        buckets: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
        for i, grad in enumerate(grads):
            if grad is not None:
                buckets.setdefault(grad.dtype, []).append((i, grad))
        for bucket in buckets.values():
            flat = torch.cat([grad.reshape(-1) for _, grad in bucket])
            pieces = wire.all_reduce(flat, ctx.axis).split([grad.numel() for _, grad in bucket])
            for (i, grad), piece in zip(bucket, pieces, strict=True):
                summed[i] = piece.view(grad.shape)
        return None, *summed
