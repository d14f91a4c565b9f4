"""Embedding, cross entropy and dropout on one rank's pieces equal the whole op."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tpcompile.collectives import (
    all_gather,
    all_reduce,
    sharded_dropout,
    split,
    vocab_cross_entropy,
    vocab_embedding,
)
from tpcompile.layout import start, take
from tpcompile.local_group import Axis, run_ranks

REDUCTIONS = ("none", "mean", "sum")
SHAPES = ((6, 0), (0,), (2, 0, 3), (2, 0, 2, 2))
"""Of the logits; 0 is the class dim."""


def plain(n: int) -> tuple[tuple[int, int, int], ...]:
    """Segments of a dim dealt out one by one."""
    return ((1, n, 1),)


def check_embedding(axis: Axis) -> None:
    """Rows and their gradients, with and without a padding row."""
    _, size, rank = axis
    torch.manual_seed(0)
    for rows, padding in itertools.product((8, 5, 2), (-1, 0, 1)):
        table = torch.randn(rows, 3, dtype=torch.float64).requires_grad_()
        ids = torch.randint(rows, (2, 7))
        want = F.embedding(ids, table, padding if padding >= 0 else None)
        upstream = torch.randn_like(want)
        (want_grad,) = torch.autograd.grad(want, table, upstream)
        weight = take(table, 0, plain(rows), size, rank)
        got = all_reduce(vocab_embedding(weight, ids, start(rows, size, rank), padding), axis)
        torch.testing.assert_close(got, want)
        (grad,) = torch.autograd.grad(got, weight, upstream)
        torch.testing.assert_close(grad, take(want_grad, 0, plain(rows), size, rank))


def cross_entropy(
    axis: Axis,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    smoothing: float,
) -> tuple[Tensor, Tensor]:
    """Loss, and the gradient of this rank's logits."""
    _, size, rank = axis
    dim = min(1, logits.ndim - 1)
    vocab = logits.shape[dim]
    local = take(logits.detach(), dim, plain(vocab), size, rank).requires_grad_()
    if weight is not None:
        weight = take(weight, 0, plain(vocab), size, rank)
    number, offset = REDUCTIONS.index(reduction), start(vocab, size, rank)
    loss = vocab_cross_entropy(
        local, target, weight, number, ignore_index, smoothing, axis, offset, vocab
    )
    upstream = torch.arange(1, 1 + loss.numel(), dtype=loss.dtype).view(loss.shape)
    return loss, torch.autograd.grad(loss, local, upstream)[0]


def check_cross_entropy(axis: Axis) -> None:
    """All reductions, weights, smoothing, ignored rows and shapes, in float64."""
    torch.manual_seed(0)
    choices = itertools.product(SHAPES, (8, 5, 2), REDUCTIONS, (False, True), (0.0, 0.2), (-100, 1))
    for shape, vocab, reduction, weighted, smoothing, ignore in choices:
        shape = tuple(n or vocab for n in shape)
        dim = min(1, len(shape) - 1)
        logits = torch.randn(shape, dtype=torch.float64)
        target = torch.randint(vocab, shape[:dim] + shape[dim + 1 :])
        if ignore < 0 and target.ndim:
            target.view(-1)[0] = ignore
        weight = torch.rand(vocab, dtype=torch.float64) if weighted else None
        case = (logits, target, weight, reduction, ignore, smoothing)
        want = cross_entropy(("", 1, 0), *case)
        loss, grad = cross_entropy(axis, *case)
        torch.testing.assert_close(loss, want[0], equal_nan=True)
        part = take(want[1], dim, plain(vocab), *axis[1:])
        torch.testing.assert_close(grad, part, equal_nan=True)


def check_low_precision(axis: Axis) -> None:
    """Half-precision logits lose no more than the op on one device."""
    torch.manual_seed(0)
    logits, target = 4 * torch.randn(16, 50), torch.randint(50, (16,))
    exact, exact_grad = cross_entropy(("", 1, 0), logits, target, None, "mean", -100, 0.1)
    for dtype in (torch.bfloat16, torch.float16):
        loss, grad = cross_entropy(axis, logits.to(dtype), target, None, "mean", -100, 0.1)
        assert loss.dtype == grad.dtype == dtype
        torch.testing.assert_close(loss.float(), exact, rtol=1.6e-2, atol=1e-2)
        part = take(exact_grad, 1, plain(50), *axis[1:])
        torch.testing.assert_close(grad.float(), part, rtol=5e-2, atol=1e-3)


def check_dropout(axis: Axis) -> None:
    """The part of the mask one device would draw, bit for bit, and the same state after it."""
    _, size, rank = axis
    strided = torch.randn(5, 4, 3).transpose(0, 2)
    for x, dim, segments in (
        (torch.randn(4, 6), 1, plain(6)),
        (torch.randn(3, 5, 4), -2, plain(5)),
        (torch.randn(12, 2), 0, ((2, 3, 1), (1, 2, 3))),
        (torch.randn(2, 1, 40), 1, plain(1)),
        (strided, 1, plain(4)),
    ):
        for p in (0.0, 0.3, 1.0):
            torch.manual_seed(7)
            want = F.dropout(x, p)
            after = torch.rand(1)
            torch.manual_seed(7)
            local = take(x, dim % x.ndim, segments, size, rank).requires_grad_()
            got = sharded_dropout(local, p, axis, dim, segments)
            assert torch.equal(got, take(want, dim % x.ndim, segments, size, rank))
            assert torch.equal(torch.rand(1), after)
            (grad,) = torch.autograd.grad(got.sum(), local)
            assert torch.equal(grad * local, got)


def check_vocab(axis: Axis) -> None:
    """All checks of this file."""
    for check in CHECKS:
        check(axis)


def tied_loss(table: Tensor, ids: Tensor, axis: Axis) -> Tensor:
    """Loss of a tied embedding and head."""
    _, size, rank = axis
    rows, offset = table.shape[0], start(table.shape[0], size, rank)
    weight = split(table, axis, 0, plain(rows))
    hidden = all_reduce(vocab_embedding(weight, ids, offset, 1), axis)
    hidden = sharded_dropout(split(hidden, axis, 0, plain(6)), 0.5, axis, 0, plain(6))
    hidden = all_gather(hidden, axis, 0, plain(6))
    return vocab_cross_entropy(hidden @ weight.t(), ids, None, 1, 2, 0.1, axis, offset, rows)


def tied_gradients(fn: Callable[..., Tensor], rows: int, axis: Axis) -> list[Tensor]:
    """Loss and gradient of `tied_loss` run by `fn`."""
    torch.manual_seed(3)
    table = torch.randn(rows, 3, dtype=torch.float64).requires_grad_()
    loss = fn(table, torch.arange(6), axis)
    return [loss, *torch.autograd.grad(loss, table)]


def check_tied(axis: Axis) -> None:
    """Embedding, dropout, head and loss together equal one device."""
    for rows in (10, 9):
        want = tied_gradients(tied_loss, rows, ("", 1, 0))
        torch.testing.assert_close(tied_gradients(tied_loss, rows, axis), want)


CHECKS = (check_embedding, check_cross_entropy, check_low_precision, check_dropout, check_tied)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("check", CHECKS)
def test_local_ranks(check: Callable[[Axis], None], size: int) -> None:
    """Every check holds on ranks that are threads."""
    run_ranks(size, check)


def test_all_ignored_mean_is_nan() -> None:
    """A mean over no rows is NaN, as torch has it, with a gradient of zero."""

    def run(axis: Axis) -> None:
        logits, target = torch.randn(3, 4), torch.full((3,), -100)
        loss, grad = cross_entropy(axis, logits, target, None, "mean", -100, 0.0)
        assert loss.isnan()
        assert not grad.any()

    run_ranks(2, run)


def test_class_out_of_range_is_nan() -> None:
    """A class no rank has gives NaN instead of a number that looks right."""

    def run(axis: Axis) -> None:
        target = torch.tensor([1, 4, 2])
        loss, _ = cross_entropy(axis, torch.randn(3, 4), target, None, "none", -100, 0.0)
        assert loss.isnan().tolist() == [False, True, False]

    run_ranks(2, run)


def test_dropout_mask_is_not_the_global_one() -> None:
    """What autograd keeps of a split dropout is as large as the part."""

    def run(axis: Axis) -> None:
        kept = []
        x = torch.randn(4, 3).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            sharded_dropout(x, 0.5, axis, 0, plain(8))
        # A byte an element, and the scale.
        assert {t.untyped_storage().nbytes() for t in kept} == {x.numel(), x.itemsize}

    run_ranks(2, run)
