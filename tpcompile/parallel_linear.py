"""Linears together with the collective before or after them, so that the two run side by side.

Autograd computes both gradients of a linear in one node, and starts a collective on the first of
them only when the second is done.  Here the collective of the input's gradient runs while the
weights' gradients are computed.  In chunks, the collective of one chunk of tokens runs while the
next one is multiplied (as in Wang et al., ASPLOS 2023).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpcompile import chunks as cut
from tpcompile import wire
from tpcompile.collectives import all_gather, all_reduce, check_first_order, copy, reduce_scatter
from tpcompile.local_group import Axis
from tpcompile.wire import Layout


def column_parallel(
    x: Tensor,
    axis: Axis,
    layout: Layout | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] = (),
    keep: bool = False,
    chunks: int = 1,
) -> tuple[Tensor, ...]:
    """Linears of one value: `copy` (`all_gather` from `layout`, if given), then each linear.

    x: [*b, k], or this rank's part of it; weights: [n, k] each -> [*b, n] each; with `keep`, the
    whole x before them.  `biases` is empty where none has one.
    """
    biases = biases or [None] * len(weights)
    if axis[1] == 1 or torch.compiler.is_compiling():  # the compiler has its own schedule
        return _plain_columns(x, axis, layout, weights, biases, keep)
    return _ColumnParallel.apply(x, axis, layout, keep, chunks, *weights, *biases)


def _plain_columns(
    x: Tensor,
    axis: Axis,
    layout: Layout | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    keep: bool,
) -> tuple[Tensor, ...]:
    if layout is not None and x.ndim > 2 and all(n == 1 for n in x.shape[: layout[0]]):
        # A batch of one: without its dim, Inductor's matcher sees a gather before its matmuls.
        shape = [*x.shape[: layout[0]], -1, *x.shape[layout[0] + 1 :]]
        flat = all_gather(x.flatten(0, layout[0]), axis, 0, layout[1])
        outs = [
            F.linear(flat, w, b).view(*shape[:-1], w.shape[0])
            for w, b in zip(weights, biases, strict=True)
        ]
        return (flat.view(shape), *outs) if keep else tuple(outs)
    whole = copy(x, axis) if layout is None else all_gather(x, axis, *layout)
    outs = [F.linear(whole, w, b) for w, b in zip(weights, biases, strict=True)]
    return (whole, *outs) if keep else tuple(outs)


def row_parallel(
    x: Tensor, weight: Tensor, axis: Axis, layout: Layout | None = None, chunks: int = 1
) -> Tensor:
    """A linear over a contracted dim that is split, then `all_reduce` (or `reduce_scatter`).

    x: [*b, k], weight: [n, k] -> [*b, n], or this rank's part of it as `layout` says.
    """
    if axis[1] == 1 or torch.compiler.is_compiling():
        y = F.linear(x, weight)
        return all_reduce(y, axis) if layout is None else reduce_scatter(y, axis, *layout)
    return _RowParallel.apply(x, weight, axis, layout, chunks)


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        axis: Axis,
        layout: Layout | None,
        keep: bool,
        chunks: int,
        *weights_and_biases: Any,
    ) -> tuple[Tensor, ...]:
        count = len(weights_and_biases) // 2
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        if layout is not None and chunks > 1:
            whole, outs = cut.gather_and_multiply(x, axis, layout, weights, biases, chunks)
        else:
            whole = x.view_as(x) if layout is None else wire.all_gather(x, axis, layout)
            outs = [F.linear(whole, w, b) for w, b in zip(weights, biases, strict=True)]
        needs = ctx.needs_input_grad
        saved = whole.detach() if any(needs[5 : 5 + count]) else None
        ctx.save_for_backward(saved, *(weights if needs[0] else ()))
        ctx.set_materialize_grads(False)
        ctx.axis, ctx.layout, ctx.keep, ctx.chunks = axis, layout, keep, chunks
        ctx.shape = whole.shape
        return (whole, *outs) if keep else tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        check_first_order(grads, (x, *weights))
        passed, outs = (grads[0], grads[1:]) if ctx.keep else (None, grads)
        started = None
        if ctx.needs_input_grad[0] and any(g is not None for g in grads):
            started = cut.start_input_gradient(
                passed, outs, weights, ctx.axis, ctx.layout, ctx.shape, ctx.chunks
            )
        needs = ctx.needs_input_grad[5:]
        found = [
            _weight_gradient(g, x) if needed and g is not None else None
            for g, needed in zip(outs, needs[: len(outs)], strict=True)
        ]
        found += [
            _rows(g).sum(0) if needed and g is not None else None
            for g, needed in zip(outs, needs[len(outs) :], strict=True)
        ]
        return None if started is None else started.wait(), None, None, None, None, *found


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, axis: Axis, layout: Layout | None, chunks: int
    ) -> Tensor:
        needs = ctx.needs_input_grad
        ctx.save_for_backward(x if needs[1] else None, weight if needs[0] else None)
        ctx.axis, ctx.layout, ctx.chunks, ctx.shape = axis, layout, chunks, x.shape
        if chunks > 1:
            return cut.multiply_and_reduce(x, weight, axis, layout, chunks)
        y = F.linear(x, weight)
        if layout is None:
            return wire.start_all_reduce_(y, axis).wait()
        return wire.reduce_scatter(y, axis, layout)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        check_first_order(grads, (x, weight))
        (grad,) = grads
        if ctx.layout is not None and ctx.chunks > 1:
            whole, for_x = cut.gather_and_multiply(
                grad,
                ctx.axis,
                ctx.layout,
                () if weight is None else (weight.t(),),
                () if weight is None else (None,),
                ctx.chunks,
            )
            grad_x = for_x[0] if for_x else None
        else:
            whole = grad if ctx.layout is None else wire.all_gather(grad, ctx.axis, ctx.layout)
            grad_x = None if weight is None else whole.matmul(weight)
        grad_weight = None if x is None else _weight_gradient(whole, x)
        return grad_x, grad_weight, None, None, None


def _rows(x: Tensor) -> Tensor:
    """[*b, k] -> [b, k]; also where k is 0 on this rank."""
    return x.flatten(0, -2)


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """grad: [*b, n], x: [*b, k] -> [n, k]."""
    return _rows(grad).t().mm(_rows(x))
