"""Ops along a dim that keep it: scans, orders, flips, windows, transforms. The dim is whole."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import randn

from tpcompile.ops.equations import (
    Shaped,
    aten,
    factor,
    names_in,
    reduced,
    replaced,
    spec_for,
    wrap,
    wrap_all,
)
from tpcompile.rule import Rule, rule

LINEAR = ((0,),)
Dims = int | Sequence[int] | None


def along(x: Shaped, dims: Dims, linear: bool = False, n_outs: int = 1) -> Rule:
    """x: [*b, n] -> [*b, n]. n whole."""
    spec = spec_for(x.shape)
    whole = names_in(spec[d] for d in wrap_all(dims, x.ndim)) if x.ndim else frozenset()
    return Rule((spec,), (spec,) * n_outs, whole, linear=LINEAR if linear else ())


@rule(
    *aten("softmax.int log_softmax.int cumprod"),
    samples=[lambda: (randn(2, 4, 6), -1), lambda: (randn(2, 4, 6), 1, {"dtype": torch.float64})],
)
@rule(*aten("_softmax _log_softmax"), samples=[lambda: (randn(2, 4, 6), -1, False)])
@rule(*aten("logcumsumexp"), samples=[lambda: (randn(2, 4, 6), -1)])
def scan(x: Shaped, dim: int, *args: Any, **kwargs: Any) -> Rule:
    """x: [*b, n] -> [*b, n]. n whole."""
    return along(x, dim)


@rule(
    *aten("cumsum cumsum_"),
    samples=[lambda: (randn(4, 6), -1), lambda: (randn(4, 6), 0, {"dtype": torch.float64})],
)
@rule(*aten("flip"), samples=[lambda: (randn(4, 6), [-1]), lambda: (randn(2, 4, 6), [0, 1])])
def scan_linear(x: Shaped, dim: Dims, **kwargs: Any) -> Rule:
    """x: [*b, n] -> [*b, n]. n whole."""
    return along(x, dim, linear=True)


@rule(*aten("roll"), samples=[lambda: (randn(4, 6), [1], [-1]), lambda: (randn(4, 6), [2])])
def roll(x: Shaped, shifts: Sequence[int], dims: Sequence[int] = ()) -> Rule:
    """x: [*b, n] -> [*b, n]. n whole; without dims all are."""
    return along(x, dims, linear=True)


@rule(
    *aten("tril triu"),
    samples=[lambda: (randn(2, 4, 6),), lambda: (randn(2, 4, 6), 1)],
)
def triangle(x: Shaped, diagonal: int = 0) -> Rule:
    """x: [*b, i, j] -> [*b, i, j]. i and j whole."""
    return along(x, [-2, -1], linear=True)


@rule(
    *aten("sort cummax cummin"),
    samples=[lambda: (randn(4, 6), -1), lambda: (randn(4, 6, 3), 1)],
)
@rule(
    *aten("sort.stable"),
    samples=[lambda: (randn(4, 6), {"stable": True, "dim": 0, "descending": True})],
)
def order(x: Shaped, dim: int = -1, *args: Any, **kwargs: Any) -> Rule:
    """x: [*b, n] -> [*b, n], [*b, n]. n whole."""
    return along(x, dim, n_outs=2)


@rule(*aten("argsort"), samples=[lambda: (randn(4, 6), -1), lambda: (randn(4, 6), 0, True)])
@rule(*aten("argsort.stable"), samples=[lambda: (randn(4, 6), {"stable": True})])
def argsort(x: Shaped, dim: int = -1, *args: Any, **kwargs: Any) -> Rule:
    """x: [*b, n] -> [*b, n]. n whole."""
    return along(x, dim)


@rule(
    *aten("topk"),
    samples=[lambda: (randn(4, 6), 2), lambda: (randn(4, 6, 3), 1, 1, False, True)],
)
def topk(x: Shaped, k: int, dim: int = -1, *args: Any) -> Rule:
    """x: [*b, n] -> [*b, k], [*b, k]. n and k whole."""
    spec, dim = spec_for(x.shape), wrap(dim, x.ndim)
    out = replaced(spec, dim, factor("k", k))
    return Rule((spec,), (out, out), names_in((spec[dim], out[dim])))


@rule(
    *aten("diff"),
    samples=[
        lambda: (randn(4, 6),),
        lambda: (randn(4, 6), 2, 0),
        lambda: (randn(4, 6), 1, -1, randn(4, 1)),
    ],
)
def diff(x: Shaped, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Rule:
    """x: [*b, n] -> [*b, m]. n and m whole."""
    spec, dim = spec_for(x.shape), wrap(dim, x.ndim)
    edges = [t for t in (prepend, append) if t is not None]
    length = x.shape[dim] - n + sum(t.shape[dim] for t in edges)
    ins = [spec] + [replaced(spec, dim, factor(f"e{i}", t.shape[dim])) for i, t in enumerate(edges)]
    out = replaced(spec, dim, factor("m", length))
    whole = names_in((*(s[dim] for s in ins), out[dim]))
    return Rule(tuple(ins), (out,), whole, linear=(tuple(range(len(ins))),))


@rule(
    *aten("unfold"),
    samples=[lambda: (randn(4, 6), 1, 3, 2), lambda: (randn(8, 3), 0, 2, 2)],
)
def unfold(x: Shaped, dimension: int, size: int, step: int) -> Rule:
    """x: [*b, n] -> [*b, m, k], m windows of k. n, m and k whole."""
    spec, dim = spec_for(x.shape), wrap(dimension, x.ndim)
    count = (x.shape[dim] - size) // step + 1
    out = (*replaced(spec, dim, factor("m", count)), factor("k", size))
    return Rule((spec,), (out,), names_in((spec[dim], out[dim], out[-1])), linear=LINEAR)


@rule(
    *aten("diagonal"),
    samples=[lambda: (randn(2, 4, 6), 0, -2, -1), lambda: (randn(4, 4), 1)],
)
def diagonal(x: Shaped, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Rule:
    """x: [*b, i, j] -> [*b, k]. i, j and k whole."""
    spec, gone = spec_for(x.shape), wrap_all([dim1, dim2], x.ndim)
    rows, columns = (x.shape[d] for d in gone)
    length = max(min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns), 0)
    out = (*reduced(spec, gone, keepdim=False), factor("k", length))
    return Rule((spec,), (out,), names_in((*(spec[d] for d in gone), out[-1])), linear=LINEAR)


@rule(
    *aten("fft_fft fft_ifft"),
    samples=[lambda: (randn(4, 6),), lambda: (randn(4, 6), 8, 0)],
)
def fft(x: Shaped, n: int | None = None, dim: int = -1, norm: str | None = None) -> Rule:
    """x: [*b, n] -> [*b, m]. n and m whole."""
    spec, dim = spec_for(x.shape), wrap(dim, x.ndim)
    out = replaced(spec, dim, factor("m", n or x.shape[dim]))
    return Rule((spec,), (out,), names_in((spec[dim], out[dim])), linear=LINEAR)


@rule(
    *aten("one_hot"), samples=[lambda: (torch.arange(4), 5), lambda: (torch.arange(4)[:, None], 4)]
)
def one_hot(x: Shaped, num_classes: int = -1) -> Rule | None:
    """x: [*b] -> [*b, v]. v whole. None where the data says how many classes there are."""
    if num_classes < 0:
        return None
    spec, classes = spec_for(x.shape), factor("v", num_classes)
    return Rule((spec,), ((*spec, classes),), names_in((classes,)))
