"""Lookups and scatters: the indexed dims are whole, the others pass."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import ops, randint, randn, tensor

from tpcompile import collectives
from tpcompile.ops.equations import (
    Shaped,
    aten,
    broadcast,
    equation,
    factor,
    names_in,
    replaced,
    spec_for,
    wrap,
)
from tpcompile.rule import Call, Rule, Spec, Split, rule

LINEAR = ((0,),)


@rule(
    *aten("embedding"),
    samples=[
        lambda: (randn(6, 4), randint(0, 6, (2, 3))),
        lambda: (randn(7, 4), randint(0, 7, (5,)), 1),
        lambda: (randn(6, 4), randint(0, 6, (2, 3)), -1, True),
    ],
)
def embedding(
    weight: Shaped,
    indices: Shaped,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Rule:
    """weight: [v, h], indices: [*b] -> [*b, h]. Split v: each rank looks its own rows up."""

    def local(split: Split, weight: Any, indices: Any, *rest: Any, **kwargs: Any) -> Call:
        if not split.is_split("v"):
            return ops.aten.embedding.default, (weight, indices, *rest), kwargs
        args = (weight, indices, split.offset("v"), padding_idx)
        return collectives.vocab_embedding, args, {}

    # Counting how often a row is used spans all ids, so it forbids splitting them.
    whole = "v *b" if scale_grad_by_freq or sparse else ""
    return equation(
        "v h, *b -> *b h", weight, indices, whole=whole, plain="v", linear=LINEAR, local=local
    )


@rule(
    *aten("gather"),
    samples=[
        lambda: (randn(4, 6), 1, randint(0, 6, (4, 3))),
        lambda: (randn(4, 6), -2, randint(0, 4, (5, 2))),
    ],
)
def gather(x: Shaped, dim: int, index: Shaped, *, sparse_grad: bool = False) -> Rule:
    """x: [*b, n], index: [*b, k] -> [*b, k]. n whole; so are dims of which index takes a part."""
    spec, idx, whole = _beside(x, index, dim)
    at = wrap(dim, x.ndim)
    return Rule((spec, idx), (idx,), whole - names_in(idx[at : at + 1]), linear=LINEAR)


def _beside(x: Shaped, index: Shaped, dim: int) -> tuple[Spec, Spec, frozenset[str]]:
    """Specs of a tensor and of an index into its `dim`; dims of one size are shared."""
    dim = wrap(dim, x.ndim)
    spec, own = spec_for(x.shape), spec_for(index.shape, "j")
    shared = [
        i != dim and n == m for i, (n, m) in enumerate(zip(x.shape, index.shape, strict=True))
    ]
    idx = tuple(spec[i] if same else own[i] for i, same in enumerate(shared))
    odd = [d for i, same in enumerate(shared) if not same for d in (spec[i], idx[i])]
    return spec, idx, names_in(odd)


@rule(
    *aten("take_along_dim"),
    samples=[
        lambda: (randn(4, 6), randint(0, 6, (4, 3)), 1),
        lambda: (randn(4, 6), randint(0, 4, (2, 6)), 0),
    ],
)
def take_along_dim(x: Shaped, indices: Shaped, dim: int | None = None) -> Rule | None:
    """x: [*b, n], indices: [*b, k] -> [*b, k]. n whole. None where dims are broadcast."""
    if dim is None or any(
        n != m
        for i, (n, m) in enumerate(zip(x.shape, indices.shape, strict=True))
        if i != wrap(dim, x.ndim)
    ):
        return None
    return gather(x, dim, indices)


@rule(
    *aten("scatter.src scatter_.src scatter_add scatter_add_"),
    samples=[
        lambda: (randn(4, 6), 1, randint(0, 6, (4, 1)), randn(4, 1)),
        lambda: (randn(4, 6), 0, torch.arange(4)[:, None].expand(4, 6), randn(4, 6)),
    ],
)
def scatter(x: Shaped, dim: int, index: Shaped, src: Shaped) -> Rule:
    """x: [*b, n], index, src: [*b, k] -> [*b, n]. n and k whole. Linear in x and src together."""
    spec, idx, whole = _beside(x, index, dim)
    if tuple(index.shape) == tuple(src.shape):
        return Rule((spec, idx, idx), (spec,), whole, linear=((0, 2),))
    other = spec_for(src.shape, "src")
    return Rule(
        (spec, idx, other), (spec,), whole | names_in((*spec, *idx, *other)), linear=((0, 2),)
    )


@rule(
    *aten("scatter.value scatter_.value"),
    samples=[
        lambda: (randn(4, 6), 1, randint(0, 6, (4, 2)), 0),
        lambda: (randn(4, 6), 0, randint(0, 4, (2, 3)), 1.5),
    ],
)
def scatter_value(x: Shaped, dim: int, index: Shaped, value: float) -> Rule:
    """x: [*b, n], index: [*b, k] -> [*b, n]. n and k whole. Linear if the value is 0."""
    spec, idx, whole = _beside(x, index, dim)
    return Rule((spec, idx), (spec,), whole, linear=() if value else LINEAR)


@rule(
    *aten("index_select"),
    samples=[
        lambda: (randn(4, 6), 1, randint(0, 6, (3,))),
        lambda: (randn(4, 6), 0, randint(0, 4, (8,))),
    ],
)
def index_select(x: Shaped, dim: int, index: Shaped) -> Rule:
    """x: [*b, n], index: [k] -> [*b, k]. n whole."""
    spec, dim = spec_for(x.shape), wrap(dim, x.ndim)
    idx = spec_for(index.shape, "k")
    out = replaced(spec, dim, *(idx or (((),),)))
    return Rule((spec, idx), (out,), names_in((spec[dim],)), linear=LINEAR)


@rule(
    *aten("index_add index_add_"),
    samples=[
        lambda: (randn(4, 6), 1, tensor([0, 2, 2]), randn(4, 3)),
        lambda: (randn(4, 6), 0, tensor([3, 0]), randn(2, 6), {"alpha": 2}),
    ],
)
@rule(
    *aten("index_copy index_copy_"),
    samples=[
        lambda: (randn(4, 6), 1, tensor([0, 2, 4]), randn(4, 3)),
        lambda: (randn(4, 6), 0, tensor([3, 0]), randn(2, 6)),
    ],
)
def index_add(x: Shaped, dim: int, index: Shaped, source: Shaped, **kwargs: Any) -> Rule:
    """x: [*b, n], index: [k], source: [*b, k] -> [*b, n]. n and k whole."""
    spec, dim = spec_for(x.shape), wrap(dim, x.ndim)
    idx = spec_for(index.shape, "k")
    added = replaced(spec, dim, *idx)
    whole = names_in((spec[dim], *idx))
    return Rule((spec, idx, added), (spec,), whole, linear=((0, 2),))


@rule(
    *aten("index_fill.int_Scalar"),
    samples=[
        lambda: (randn(4, 6), 1, tensor([0, 2]), 0.0),
        lambda: (randn(4, 6), 0, tensor([1]), 2.0),
    ],
)
def index_fill(x: Shaped, dim: int, index: Shaped, value: float) -> Rule:
    """x: [*b, n], index: [k] -> [*b, n]. n and k whole."""
    spec, idx = spec_for(x.shape), spec_for(index.shape, "k")
    whole = names_in((spec[wrap(dim, x.ndim)], *idx))
    return Rule((spec, idx), (spec,), whole, linear=() if value else LINEAR)


def indexed(x: Shaped, indices: Sequence[Shaped | None]) -> tuple[Spec, list[Spec], Spec] | None:
    """(x, indices, result) of `x[indices]`; None for masks, whose result has no known size.

    The dims of the indices stand where the first of them stood, in front if they are apart.
    """
    given = [(i, t) for i, t in enumerate(indices) if t is not None]
    if not given or any(t.dtype in (torch.bool, torch.uint8) for _, t in given):
        return None
    places = [i for i, _ in given]
    spec = spec_for(x.shape)
    ins, new = broadcast([t.shape for _, t in given], "j")
    at = places[0] if places[-1] - places[0] == len(places) - 1 else 0
    kept = [(i, d) for i, d in enumerate(spec) if i not in places]
    out = (*(d for i, d in kept if i < at), *new, *(d for i, d in kept if i >= at))
    return spec, ins, out


@rule(
    *aten("index.Tensor"),
    samples=[
        lambda: (randn(4, 6), [None, randint(0, 6, (3,))]),
        lambda: (randn(4, 6), [randint(0, 4, (3, 2))]),
        lambda: (randn(4, 6, 8), [randint(0, 4, (3, 1)), randint(0, 6, (2,))]),
        lambda: (randn(4, 6, 8), [randint(0, 4, (3,)), None, randint(0, 8, (3,))]),
        lambda: (randn(4, 6, 8), [None, randint(0, 6, (3,)), tensor(1)]),
    ],
)
def index(x: Shaped, indices: Sequence[Shaped | None]) -> Rule | None:
    """x: [*b, n], indices: [*k] -> [*b, *k]. n whole. None for masks."""
    found = indexed(x, indices)
    if found is None:
        return None
    spec, ins, out = found
    whole = names_in(spec[i] for i, t in enumerate(indices) if t is not None)
    return Rule((spec, *ins), (out,), whole, linear=LINEAR)


@rule(
    *aten("index_put index_put_"),
    samples=[
        lambda: (randn(4, 6), [None, tensor([1, 3])], randn(4, 2)),
        lambda: (randn(4, 6), [tensor([1, 3, 1])], randn(6), True),
        lambda: (randn(4, 6), [tensor([0, 3]), tensor([1, 2])], tensor(0.5)),
    ],
)
def index_put(
    x: Shaped, indices: Sequence[Shaped | None], values: Shaped, accumulate: bool = False
) -> Rule | None:
    """x: [*b, n], indices: [*k], values: [*b, *k] -> [*b, n]. n and k whole. None for masks."""
    found = indexed(x, indices)
    if found is None:
        return None
    spec, ins, place = found
    where = place[len(place) - values.ndim :]
    written = tuple(d if n != 1 else ((),) for d, n in zip(where, values.shape, strict=True))
    whole = names_in(spec[i] for i, t in enumerate(indices) if t is not None)
    whole |= names_in(d for idx in ins for d in idx)
    return Rule((spec, *ins, written), (spec,), whole, linear=((0, len(ins) + 1),))


@rule(
    *aten("slice_scatter"),
    samples=[
        lambda: (randn(4, 6), randn(4, 3), 1, 0, 3),
        lambda: (randn(4, 6), randn(2, 6), 0, 1, 3),
    ],
)
def slice_scatter(x: Shaped, src: Shaped, dim: int = 0, *args: Any, **kwargs: Any) -> Rule:
    """x: [*b, n], src: [*b, k] -> [*b, n]. n and k whole."""
    spec, dim = spec_for(x.shape), wrap(dim, x.ndim)
    put = replaced(spec, dim, factor("k", src.shape[dim]))
    return Rule((spec, put), (spec,), names_in((spec[dim], put[dim])), linear=((0, 1),))


@rule(
    *aten("select_scatter"),
    samples=[lambda: (randn(4, 6), randn(4), 1, 2), lambda: (randn(4, 6), randn(6), 0, -1)],
)
def select_scatter(x: Shaped, src: Shaped, dim: int, index: int) -> Rule:
    """x: [*b, n], src: [*b] -> [*b, n]. n whole."""
    spec, dim = spec_for(x.shape), wrap(dim, x.ndim)
    return Rule((spec, replaced(spec, dim)), (spec,), names_in((spec[dim],)), linear=((0, 1),))


@rule(
    *aten("bucketize.Tensor"),
    samples=[lambda: (randn(4, 6), tensor([-1.0, 0.0, 1.0]))],
)
@rule(*aten("isin.Tensor_Tensor"), samples=[lambda: (randint(0, 9, (4, 6)), tensor([1, 2, 3]))])
def lookup(x: Shaped, table: Shaped, **kwargs: Any) -> Rule:
    """x: [*b], table: [*n] -> [*b]. n whole."""
    table_spec = spec_for(table.shape, "n")
    spec = spec_for(x.shape)
    return Rule((spec, table_spec), (spec,), names_in(table_spec))
