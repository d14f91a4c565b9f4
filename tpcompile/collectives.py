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

_MOVES: dict[Move, Callable[[Tensor, Axis, Any, Any], Tensor]] = {
    "none": lambda x, axis, source, target: x.view_as(x),
    "all_reduce": lambda x, axis, source, target: wire.all_reduce(x, axis),
    "reduce_scatter": lambda x, axis, source, target: wire.reduce_scatter(x, axis, target),
    "all_gather": lambda x, axis, source, target: wire.all_gather(x, axis, source),
    "take": lambda x, axis, source, target: wire.take_own(x, axis, target),
    "pad": lambda x, axis, source, target: wire.pad_own(x, axis, source),
    "first": lambda x, axis, source, target: x.view_as(x) if axis[2] == 0 else torch.zeros_like(x),
    "all_to_all": wire.all_to_all,
}
"""How to make each move of a tensor split as `source` (None: not split) into one as `target`."""


def copy(x: Tensor, axis: Axis) -> Tensor:
    """R -> R*: the same value for readers that return partial gradients, which are summed."""
    return _convert(x, axis, "none", "all_reduce")


def copy_many(axis: Axis, *xs: Tensor) -> tuple[Tensor, ...]:
    """`copy` of several values whose gradients of one dtype are summed in one all-reduce."""
    return xs if axis[1] == 1 else _CopyMany.apply(axis, *xs)


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """P -> R: the sum over the ranks."""
    return _convert(x, axis, "all_reduce", "none")


def reduce_scatter(x: Tensor, axis: Axis, dim: int, segments: Segments) -> Tensor:
    """P -> S: this rank's part of the sum over the ranks."""
    return _convert(x, axis, "reduce_scatter", "all_gather", target=(dim % x.ndim, segments))


def all_gather(
    x: Tensor, axis: Axis, dim: int, segments: Segments, partial_grad: bool = True
) -> Tensor:
    """S -> R* (S -> R unless `partial_grad`): the global tensor from every rank's part."""
    backward = "reduce_scatter" if partial_grad else "take"
    return _convert(x, axis, "all_gather", backward, source=(dim % x.ndim, segments))


def split(
    x: Tensor, axis: Axis, dim: int, segments: Segments, partial_grad: bool = False
) -> Tensor:
    """R -> S (R* -> S if `partial_grad`): this rank's part, without traffic."""
    backward = "pad" if partial_grad else "all_gather"
    return _convert(x, axis, "take", backward, target=(dim % x.ndim, segments))


def all_to_all(
    x: Tensor, axis: Axis, dim: int, segments: Segments, to_dim: int, to_segments: Segments
) -> Tensor:
    """S -> S': the part split along `to_dim` of a value that is split along `dim`."""
    source, target = (dim % x.ndim, segments), (to_dim % x.ndim, to_segments)
    return _convert(x, axis, "all_to_all", "all_to_all", source, target)


def to_partial(x: Tensor, axis: Axis, partial_grad: bool = False) -> Tensor:
    """R -> P (R* -> P if `partial_grad`): counted once, by rank 0, without traffic.

    So a bias can be added to a partial sum, and the sum be reduced together with others.
    """
    return _convert(x, axis, "first", "first" if partial_grad else "none")


def pad(x: Tensor, axis: Axis, dim: int, segments: Segments) -> Tensor:
    """S -> P: the parts, each with zeros elsewhere, without traffic.

    So a residual that is split can be added to partial sums, and all be reduced together.
    """
    return _convert(x, axis, "pad", "take", source=(dim % x.ndim, segments))


def _convert(
    x: Tensor,
    axis: Axis,
    forward: Move,
    backward: Move,
    source: Layout | None = None,
    target: Layout | None = None,
) -> Tensor:
    if axis[1] == 1:
        return x
    return _Conversion.apply(x, axis, forward, backward, source, target)


class _Conversion(torch.autograd.Function):
    """One move forward, its partner backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        axis: Axis,
        forward: Move,
        backward: Move,
        source: Layout | None,
        target: Layout | None,
    ) -> Tensor:
        ctx.axis, ctx.move, ctx.source, ctx.target = axis, backward, source, target
        return _MOVES[forward](x, axis, source, target)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        _check_first_order(grads)
        grad = _MOVES[ctx.move](grads[0], ctx.axis, ctx.target, ctx.source)
        return grad, None, None, None, None, None


def _check_first_order(grads: Sequence[Tensor | None]) -> None:
    """Refuse gradients of gradients, and many at once: no state is known of those."""
    if torch.compiler.is_compiling():
        return
    for grad in grads:
        if grad is not None and (grad.requires_grad or is_batched(grad)):
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
        _check_first_order(grads)
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
