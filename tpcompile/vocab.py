"""Ops on one rank's pieces that are more than the same op: a split vocabulary, a split dropout."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpcompile import wire
from tpcompile.layout import Segments, take
from tpcompile.local_group import Axis

NONE, MEAN, SUM = range(3)  # as ATen numbers the reductions of a loss


def vocab_embedding(weight: Tensor, ids: Tensor, offset: int, padding_idx: int = -1) -> Tensor:
    """Rows `offset .. offset + v` of an embedding table, a partial sum over the ranks.

    weight: [v, k] on this rank, ids: [*b] -> [*b, k]; zeros where another rank has the row.
    `padding_idx` is a row of the global table (-1: none); it gets no gradient.
    """
    rows = weight.shape[0]
    if rows == 0:
        # The sum of no rows is zero, and keeps the (empty) gradient of the weight defined.
        return weight.sum(0).expand(*ids.shape, weight.shape[1]).contiguous()
    local = ids - offset
    elsewhere = (local < 0) | (local >= rows)
    padding = padding_idx - offset if offset <= padding_idx < offset + rows else None
    # Any row will do for an id of another rank; the remainder spreads them over the table, because
    # adding all their (zero) gradients into one row would be slow.
    out = F.embedding(local.remainder(rows), weight, padding)
    return out.masked_fill(elsewhere.unsqueeze(-1), 0)


def vocab_cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    axis: Axis,
    offset: int,
    vocab: int,
) -> Tensor:
    """`F.cross_entropy` of logits that are split along the classes, the same on every rank.

    logits: [b, v], [v] or [b, v, *d] with classes `offset .. offset + v` of `vocab` on this rank,
    target: [b], [] or [b, *d], weight: [v] on this rank; `reduction` as ATen numbers it.  Moves
    four numbers a row (six with label smoothing), in the forward pass only.
    """
    assert not target.is_floating_point(), "targets that are class probabilities are not supported"
    if axis[1] == 1:
        name = ("none", "mean", "sum")[reduction]
        return F.cross_entropy(
            logits,
            target,
            weight,
            ignore_index=ignore_index,
            reduction=name,
            label_smoothing=label_smoothing,
        )
    rows = logits if logits.ndim < 3 else logits.movedim(1, -1)
    loss, row_weight = _CrossEntropy.apply(
        rows.reshape(target.numel(), rows.shape[-1]),
        target.reshape(-1),
        weight,
        ignore_index,
        label_smoothing,
        axis,
        offset,
        vocab,
    )
    if reduction == NONE:
        return loss.view(target.shape).to(logits.dtype)
    total = loss.sum() if reduction == SUM else loss.sum() / row_weight.sum()
    return total.to(logits.dtype)


def sharded_dropout(x: Tensor, p: float, axis: Axis, dim: int, segments: Segments) -> Tensor:
    """Training dropout of the part of a tensor that is split along `dim`.

    Draws the mask of the global tensor, as one CPU device would, and keeps its own part of it: all
    ranks must share the random state, which then stays the same on all of them.
    """
    _, size, rank = axis
    if size == 1:
        return F.dropout(x, p)
    dim %= x.ndim
    shape = list(x.shape)
    shape[dim] = sum(outer * units * inner for outer, units, inner in segments)
    if p == 0 or 0 in shape:
        return x
    if p == 1:
        return x * 0
    # Draws go to the elements in storage order, which ATen's empty_like takes from the input.
    order = list(range(x.ndim))
    if not x.is_contiguous():
        order.sort(key=x.stride, reverse=True)
    mask = torch.empty_permuted(shape, order, dtype=x.dtype, device=x.device).bernoulli_(1 - p)
    # Autograd then keeps one byte an element, the mask of what is dropped.
    dropped = take(mask, dim, segments, size, rank) == 0
    return x.masked_fill(dropped, 0) * x.new_ones(()).div(1 - p)


class _CrossEntropy(torch.autograd.Function):
    """(loss, weight of the target's class) of every row, in float32 at least.

    With p the softmax over all classes, t the target, w the class weights (1 if None), W their
    sum, e the label smoothing and V the number of classes, a row has

        loss = -(1 - e) w[t] log p[t] - e/V sum(w log p)
        dloss/dx[v] = ((1 - e) w[t] + e/V W) p[v] - (1 - e) w[t] (v == t) - e/V w[v]

    as in ATen's cross_entropy_loss_label_smoothing.  It saves the logits, which are alive anyhow,
    and three numbers a row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int,
        smoothing: float,
        axis: Axis,
        offset: int,
        vocab: int,
    ) -> tuple[Tensor, Tensor]:
        highest = wire.all_reduce(_row_max(logits), axis, "max")
        x = logits - highest.unsqueeze(1)
        weights = x.new_ones(x.shape[1]) if weight is None else weight.to(x.dtype)
        kept = target != ignore_index
        index, here = _local_index(target, kept, offset, x.shape[1])
        terms = [_pick(x, index, here), _pick(weights.expand_as(x), index, here)]
        if smoothing > 0:
            terms += [(x * weights).sum(1), weights.sum().expand_as(highest)]
        terms.append(x.exp_().sum(1))
        picked, row_weight, *smooth, total = wire.all_reduce(torch.stack(terms), axis).unbind()
        norm = total.log()
        scale = (1 - smoothing) * row_weight
        loss = scale * (norm - picked)
        if smoothing > 0:
            log_sum, weight_sum = smooth
            loss = loss + smoothing / vocab * (weight_sum * norm - log_sum)
            scale = scale + smoothing / vocab * weight_sum
        # ATen raises for a class that does not exist; without a device sync, NaN is as loud.
        loss = loss.masked_fill((target < 0) | (target >= vocab), torch.nan)
        ctx.save_for_backward(logits, target, weight, highest + norm, row_weight, scale)
        ctx.mark_non_differentiable(row_weight)
        ctx.ignore_index, ctx.offset = ignore_index, offset
        ctx.smoothing, ctx.uniform = smoothing, smoothing / vocab
        return loss.masked_fill(~kept, 0), row_weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        logits, target, weight, norm, row_weight, scale = ctx.saved_tensors
        kept = target != ctx.ignore_index
        index, here = _local_index(target, kept, ctx.offset, logits.shape[1])
        # A mean over no rows has an infinite gradient; an ignored row still gets zero.
        grad = grads[0].masked_fill(~kept, 0).unsqueeze(1)
        out = (logits - norm.unsqueeze(1)).exp_().mul_(scale.unsqueeze(1) * grad)
        if logits.shape[1] > 0:
            hit = ((1 - ctx.smoothing) * row_weight * here).unsqueeze(1)
            out.scatter_add_(1, index.unsqueeze(1), -hit * grad)
        if ctx.smoothing > 0:
            out.sub_(ctx.uniform * grad * (1 if weight is None else weight.to(out.dtype)))
        return out.to(logits.dtype), *[None] * 7


def _row_max(x: Tensor) -> Tensor:
    """[b, v] -> [b] in float32 at least; a rank without classes does not raise the maximum."""
    highest = x.amax(1) if x.shape[1] else x.new_full((x.shape[0],), -torch.inf)
    return highest.to(torch.promote_types(x.dtype, torch.float32))


def _local_index(target: Tensor, kept: Tensor, offset: int, classes: int) -> tuple[Tensor, Tensor]:
    """[b] -> index of the target's class on this rank, 0 if elsewhere; and whether it is here."""
    local = target - offset
    here = kept & (local >= 0) & (local < classes)
    return local.masked_fill(~here, 0), here


def _pick(x: Tensor, index: Tensor, here: Tensor) -> Tensor:
    """x[i, index[i]] where it is here, else 0: [b, v] -> [b]."""
    if not x.shape[1]:
        return x.new_zeros(x.shape[0])
    return x.gather(1, index.unsqueeze(1)).squeeze(1).masked_fill(~here, 0)
