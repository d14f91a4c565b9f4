"""Ops that reduce, scan or order along dims. Only a sum may be split where it reduces."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, ops, randn

from tpcompile.ops.equations import (
    Shaped,
    aten,
    names_in,
    reduced,
    spec_for,
    wrap_all,
)
from tpcompile.rule import Call, Rule, Split, rule

LINEAR = ((0,),)
Dims = int | Sequence[int] | None


@rule(*aten("sum"), samples=[lambda: (randn(4, 6),)])
@rule(
    *aten("sum.dim_IntList"),
    samples=[
        lambda: (randn(4, 6, 3), [1]),
        lambda: (randn(4, 6, 3), [0, -1], True),
        lambda: (randn(4, 6, 3), None),
        lambda: (randn(4, 6), [-1], False, {"dtype": torch.float64}),
    ],
)
def sum_(x: Shaped, dim: Dims = None, keepdim: bool = False, **kwargs: Any) -> Rule:
    """x: [*b, n] -> [*b]. Split n: partial sums."""
    spec = spec_for(x.shape)
    out = reduced(spec, wrap_all(dim, x.ndim), keepdim)
    return Rule((spec,), (out,), linear=LINEAR)


@rule(*aten("mean"), samples=[lambda: (randn(4, 6),)])
@rule(
    *aten("mean.dim"),
    samples=[
        lambda: (randn(4, 6, 3), [-1], True),
        lambda: (randn(4, 6, 3), [0, 1]),
        lambda: (randn(4, 6, 3), None, False, {"dtype": torch.float64}),
    ],
)
def mean(x: Shaped, dim: Dims = None, keepdim: bool = False, **kwargs: Any) -> Rule:
    """x: [*b, n] -> [*b]. Split n: each rank's sum over the global count."""
    spec, dims = spec_for(x.shape), wrap_all(dim, x.ndim)
    counted = sorted(names_in(spec[d] for d in dims))

    def local(split: Split, x: Any, *args: Any, **kwargs: Any) -> Call:
        if not any(map(split.is_split, counted)):
            op = ops.aten.mean.dim if args or "dim" in kwargs else ops.aten.mean.default
            return op, (x, *args), kwargs
        sizes = [split.global_size(name) for name in counted]
        return share_of_mean, (x, dims, keepdim, sizes, kwargs.get("dtype")), {}

    return Rule((spec,), (reduced(spec, dims, keepdim),), linear=LINEAR, local=local)


def share_of_mean(
    x: Tensor,
    dims: list[int],
    keepdim: bool,
    counts: list[int],
    dtype: torch.dtype | None = None,
) -> Tensor:
    """This rank's part of a mean over `prod(counts)` elements: the ranks' parts add up to it."""
    count = 1
    for size in counts:
        count = count * size
    out = dtype or x.dtype
    # Half precision has no room for a sum of many elements before it is divided.
    return (x.sum(dims, keepdim, dtype=torch.promote_types(out, torch.float32)) / count).to(out)


@rule(
    *aten("amax amin any.dims all.dims"),
    samples=[
        lambda: (randn(4, 6), [1]),
        lambda: (randn(4, 6), [0, 1], True),
    ],
)
@rule(
    *aten("max min prod any all std var median"),
    samples=[lambda: (randn(4, 6),)],
)
@rule(
    *aten("any.dim all.dim argmax argmin prod.dim_int count_nonzero nansum"),
    samples=[lambda: (randn(4, 6), 1), lambda: (randn(4, 6, 3), -2)],
)
@rule(
    *aten("logsumexp"),
    samples=[lambda: (randn(4, 6), [-1]), lambda: (randn(4, 6), [0, 1], True)],
)
def reduce_whole(x: Shaped, dim: Dims = None, keepdim: bool = False, **kwargs: Any) -> Rule:
    """x: [*b, n] -> [*b]. n whole: its reduction is not a sum."""
    spec, dims = spec_for(x.shape), wrap_all(dim, x.ndim)
    return Rule((spec,), (reduced(spec, dims, keepdim),), names_in(spec[d] for d in dims))


@rule(
    *aten("std.dim var.dim"),
    samples=[lambda: (randn(4, 6), [1]), lambda: (randn(4, 6), [0], False, True)],
)
def reduce_unbiased(
    x: Shaped, dim: Dims = None, unbiased: bool = True, keepdim: bool = False
) -> Rule:
    """x: [*b, n] -> [*b]. n whole."""
    return reduce_whole(x, dim, keepdim)


@rule(
    *aten("std.correction var.correction"),
    samples=[
        lambda: (randn(4, 6), [1], {"correction": 0}),
        lambda: (randn(4, 6), None, {"keepdim": True}),
    ],
)
def reduce_corrected(
    x: Shaped, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> Rule:
    """x: [*b, n] -> [*b]. n whole."""
    return reduce_whole(x, dim, keepdim)


@rule(
    *aten("var_mean.correction std_mean.correction"),
    samples=[
        lambda: (randn(4, 6), [1], {"correction": 0}),
        lambda: (randn(4, 6), [0], {"keepdim": True}),
    ],
)
def reduce_to_moments(
    x: Shaped, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> Rule:
    """x: [*b, n] -> [*b], [*b]. n whole."""
    made = reduce_whole(x, dim, keepdim)
    return Rule(made.ins, made.outs * 2, made.whole)


@rule(
    *aten("linalg_vector_norm"),
    samples=[
        lambda: (randn(4, 6), 2, [-1], True),
        lambda: (randn(4, 6),),
        lambda: (randn(4, 6), 1, [0]),
    ],
)
@rule(*aten("norm.ScalarOpt_dim"), samples=[lambda: (randn(4, 6), 2, [1], True)])
@rule(*aten("norm.Scalar"), samples=[lambda: (randn(4, 6), 2)])
def vector_norm(
    x: Shaped, ord: float | None = 2, dim: Dims = None, keepdim: bool = False, **kwargs: Any
) -> Rule:
    """x: [*b, n] -> [*b]. n whole."""
    return reduce_whole(x, dim, keepdim)


@rule(
    *aten("max.dim min.dim median.dim mode"),
    samples=[lambda: (randn(4, 6), 1), lambda: (randn(4, 6), 0, True)],
)
def reduce_with_indices(x: Shaped, dim: int = -1, keepdim: bool = False) -> Rule:
    """x: [*b, n] -> [*b], [*b]. n whole."""
    made = reduce_whole(x, dim, keepdim)
    return Rule(made.ins, made.outs * 2, made.whole)
