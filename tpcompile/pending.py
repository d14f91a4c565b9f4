"""A conversion in two halves, with other work between them, forward and backward.

The forward's start is the backward's wait.  `start` and `wait` share a `Pending`; what links them
for autograd is the ticket, a view of the operand, whose gradient is a stand-in: the real one comes
by way of the `Pending`, when `start`'s backward has waited for it.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tpcompile.collectives import Moves, check_first_order, convert, moves_of
from tpcompile.local_group import Axis
from tpcompile.wire import Started


@dataclass
class Pending:
    """A conversion on its way."""

    axis: Axis
    moves: Moves
    forward: Started | None = field(default=None, repr=False)
    backward: Started | None = field(default=None, repr=False)

    def __del__(self) -> None:
        """Wait for what nobody waited for: a checkpoint's second forward stops where it has all.

        torch keeps the buffers of a functional collective until someone does.
        """
        if self.forward is not None:
            self.forward.wait()


def start(
    name: str, x: Tensor, axis: Axis, *layout: Any, partial_grad: bool | None = None
) -> tuple[Pending, Tensor]:
    """Start the conversion of that name, with its arguments; exactly one `wait` must follow."""
    extra = () if partial_grad is None else (partial_grad,)
    pending = Pending(axis, moves_of(name, x, *layout, *extra))
    if _in_one(axis):
        return pending, x
    return pending, _Start.apply(x, pending)


def wait(started: tuple[Pending, Tensor]) -> Tensor:
    """What the conversion gives."""
    pending, ticket = started
    if _in_one(pending.axis):
        return convert(ticket, pending.axis, pending.moves)
    return _Wait.apply(ticket, pending)


def _in_one(axis: Axis) -> bool:
    """Whether to convert at once: alone, or where a compiler makes a schedule of its own."""
    return axis[1] == 1 or torch.compiler.is_compiling()


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: Pending) -> Tensor:
        ctx.pending = pending
        pending.forward = pending.moves.begin(x, pending.axis)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        backward, ctx.pending.backward = ctx.pending.backward, None
        assert backward is not None
        return backward.wait(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, pending: Pending) -> Tensor:
        forward, pending.forward = pending.forward, None
        assert forward is not None
        ctx.pending, ctx.shape = pending, ticket.shape
        return forward.wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        check_first_order(grads)
        (grad,) = grads
        ctx.pending.backward = ctx.pending.moves.begin_backward(grad, ctx.pending.axis)
        return grad.new_empty(()).expand(ctx.shape), None
