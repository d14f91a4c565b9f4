"""Ops that only re-index: reshapes, dims moved, added, dropped or repeated."""

from collections.abc import Sequence
from typing import Any

from torch import ops, randn

from tpcompile.ops.equations import (
    Shaped,
    aten,
    broadcast,
    factor,
    replaced,
    spec_for,
    wrap,
    wrap_all,
)
from tpcompile.ops.reshape import filled, reshape_rule, with_local_shape
from tpcompile.rule import Call, Rule, Spec, Split, rule

LINEAR = ((0,),)


@rule(
    *aten("view reshape _unsafe_view"),
    samples=[
        lambda: (randn(2, 6, 12), [2, 6, 4, 3]),
        lambda: (randn(2, 6, 4, 3), [2, 6, -1]),
        lambda: (randn(2, 1, 6), [12]),
        lambda: (randn(6, 4), [3, 8]),
        lambda: (randn(6, 4), [8, 3]),
        lambda: (randn(5, 6, 4), [5, 8, 3]),
    ],
)
def view(x: Shaped, size: Sequence[int]) -> Rule | None:
    """x: [...] -> [...], each dim the product of common factors."""
    return _reshaped(x, size)


@rule(
    *aten("view_as reshape_as"),
    samples=[lambda: (randn(2, 6), randn(2, 3, 2)), lambda: (randn(6, 4), randn(4, 6))],
)
def view_as(x: Shaped, other: Shaped) -> Rule | None:
    """x: [...], other: [...] -> the shape of `other`, which must be split alike."""
    made = _reshaped(x, other.shape)
    return made and Rule(
        (*made.ins, *made.outs), made.outs, made.whole, sizes=made.sizes, linear=LINEAR
    )


def _reshaped(x: Shaped, size: Sequence[int]) -> Rule | None:
    made = reshape_rule(x.shape, size, None)
    return made and Rule(
        made.ins,
        made.outs,
        made.whole,
        sizes=made.sizes,
        linear=LINEAR,
        local=with_local_shape(ops.aten.reshape.default, made.outs[0]),
    )


@rule(
    *aten("flatten.using_ints"),
    samples=[lambda: (randn(2, 3, 4), 1), lambda: (randn(2, 3, 4), 0, 1), lambda: (randn(2, 4),)],
)
def flatten(x: Shaped, start_dim: int = 0, end_dim: int = -1) -> Rule | None:
    """x: [*b, i, j, *c] -> [*b, (i j), *c]."""
    if x.ndim == 0:
        return None
    first, last = wrap(start_dim, x.ndim), wrap(end_dim, x.ndim)
    return reshape_rule(x.shape, [*x.shape[:first], -1, *x.shape[last + 1 :]], None)


@rule(*aten("ravel"), samples=[lambda: (randn(2, 3, 4),)])
def ravel(x: Shaped) -> Rule | None:
    """x: [i, j] -> [(i j)]."""
    return reshape_rule(x.shape, [-1], None)


@rule(
    *aten("unflatten.int"),
    samples=[lambda: (randn(2, 12), 1, [3, -1]), lambda: (randn(12, 2), -2, [2, 2, 3])],
)
def unflatten(x: Shaped, dim: int, sizes: Sequence[int]) -> Rule | None:
    """x: [*b, (i j)] -> [*b, i, j]."""
    dim = wrap(dim, x.ndim)
    inside = filled([x.shape[dim]], sizes)
    return _reshaped(x, [*x.shape[:dim], *inside, *x.shape[dim + 1 :]])


def _permuted(x: Shaped, order: Sequence[int]) -> Rule:
    spec = spec_for(x.shape)
    return Rule((spec,), (tuple(spec[i] for i in order),), linear=LINEAR)


@rule(
    *aten("transpose.int transpose_ swapaxes swapdims"),
    samples=[lambda: (randn(2, 3, 4), 1, 2), lambda: (randn(2, 3, 4), -1, 0)],
)
def transpose(x: Shaped, dim0: int, dim1: int) -> Rule:
    """x: [*b, i, j] -> [*b, j, i]."""
    order = list(range(x.ndim))
    if x.ndim:
        i, j = wrap(dim0, x.ndim), wrap(dim1, x.ndim)
        order[i], order[j] = order[j], order[i]
    return _permuted(x, order)


@rule(
    *aten("permute"),
    samples=[lambda: (randn(2, 3, 4), [2, 0, 1]), lambda: (randn(2, 3, 4), [0, -1, 1])],
)
def permute(x: Shaped, dims: Sequence[int]) -> Rule:
    """x: [i, j, k] -> its dims in the given order."""
    return _permuted(x, [wrap(d, x.ndim) for d in dims])


@rule(*aten("t numpy_T"), samples=[lambda: (randn(4, 6),)])
def reverse_dims(x: Shaped) -> Rule:
    """x: [i, j] -> [j, i]."""
    return _permuted(x, range(x.ndim)[::-1])


@rule(*aten("mT adjoint"), samples=[lambda: (randn(2, 4, 6),)])
def matrix_transpose(x: Shaped) -> Rule:
    """x: [*b, i, j] -> [*b, j, i]."""
    return transpose(x, -1, -2)


@rule(*aten("movedim.int moveaxis.int"), samples=[lambda: (randn(2, 3, 4), 0, -1)])
@rule(*aten("movedim.intlist moveaxis.intlist"), samples=[lambda: (randn(2, 3, 4), [0, 1], [2, 0])])
def movedim(x: Shaped, source: int | Sequence[int], destination: int | Sequence[int]) -> Rule:
    """x: [i, j, k] -> some dims moved, the others in order."""
    sources, places = wrap_all(source, x.ndim), wrap_all(destination, x.ndim)
    at = dict(zip(places, sources, strict=True))
    rest = iter(d for d in range(x.ndim) if d not in sources)
    return _permuted(x, [at[i] if i in at else next(rest) for i in range(x.ndim)])


@rule(
    *aten("unsqueeze unsqueeze_"),
    samples=[lambda: (randn(4, 6), 1), lambda: (randn(4, 6), -1)],
)
def unsqueeze(x: Shaped, dim: int) -> Rule:
    """x: [*b, i] -> [*b, 1, i]."""
    spec, dim = spec_for(x.shape), wrap(dim, x.ndim + 1)
    return Rule((spec,), ((*spec[:dim], ((),), *spec[dim:]),), linear=LINEAR)


@rule(
    *aten("squeeze.dim"),
    samples=[lambda: (randn(4, 1, 2), 1), lambda: (randn(4, 1, 2), -1)],
)
@rule(*aten("squeeze.dims"), samples=[lambda: (randn(4, 1, 2), [1, -1])])
@rule(*aten("squeeze"), samples=[lambda: (randn(4, 1, 2),), lambda: (randn(1, 4, 1),)])
def squeeze(x: Shaped, dim: int | Sequence[int] | None = None) -> Rule:
    """x: [*b, 1] -> [*b]. A dim may have local size 1 without having global size 1."""
    dropped = [d for d in wrap_all(dim, x.ndim) if x.shape[d] == 1]
    spec = spec_for(x.shape)
    out = tuple(d for i, d in enumerate(spec) if i not in dropped)

    def local(split: Split, x: Any, *args: Any) -> Call:
        return ops.aten.squeeze.dims, (x, dropped), {}

    return Rule((spec,), (out,), linear=LINEAR, local=local)


@rule(
    *aten("expand broadcast_to"),
    samples=[
        lambda: (randn(2, 1, 4), [2, 6, 4]),
        lambda: (randn(4, 1), [3, -1, 6]),
        lambda: (randn(4), [4]),
    ],
)
def expand(x: Shaped, size: Sequence[int], *, implicit: bool = False) -> Rule:
    """x: [*b, 1] -> [*b, n]; n is on the output only."""
    extra = len(size) - x.ndim
    spec = spec_for((*[1] * extra, *x.shape))
    kept = [i >= extra and (n == -1 or x.shape[i - extra] == n) for i, n in enumerate(size)]
    out = tuple(
        spec[i] if keep else factor(f"n{i}", n)
        for i, (n, keep) in enumerate(zip(size, kept, strict=True))
    )

    def local(split: Split, x: Any, size: Any, **kwargs: Any) -> Call:
        sizes = [-1 if keep else split.length(d) for keep, d in zip(kept, out, strict=True)]
        return ops.aten.expand.default, (x, sizes), {}

    return Rule((spec[extra:],), (out,), linear=LINEAR, local=local)


@rule(
    *aten("expand_as"),
    samples=[lambda: (randn(2, 1, 4), randn(2, 6, 4)), lambda: (randn(4), randn(3, 4))],
)
def expand_as(x: Shaped, other: Shaped) -> Rule:
    """x: [*b, 1], other: [*b, n] -> [*b, n]."""
    ins, out = broadcast([x.shape, other.shape])
    return Rule(tuple(ins), (out,), linear=LINEAR)


@rule(*aten("broadcast_tensors"), samples=[lambda: ([randn(4, 1), randn(6)],)])
def broadcast_tensors(tensors: Sequence[Shaped]) -> Rule:
    """Each: [*b] -> all of one shape."""
    ins, out = broadcast([t.shape for t in tensors])
    return Rule(tuple(ins), (out,) * len(ins), linear=(tuple(range(len(ins))),))


@rule(
    *aten("repeat tile"),
    samples=[lambda: (randn(4, 6), [1, 2]), lambda: (randn(4, 1), [2, 3, 4])],
)
def repeat(x: Shaped, repeats: Sequence[int]) -> Rule:
    """x: [i, j] -> [r, i, (r j)]; the copies r are on the output only."""
    width = max(x.ndim, len(repeats))
    spec = spec_for((*[1] * (width - x.ndim), *x.shape))
    counts = [1] * (width - len(repeats)) + list(repeats)
    out: Spec = tuple(
        ((f"r{i}", *dim[0]) if count != 1 else dim[0],)
        for i, (dim, count) in enumerate(zip(spec, counts, strict=True))
    )
    copies = {f"r{i}": count for i, count in enumerate(counts) if count != 1}

    def local(split: Split, x: Any, repeats: Any) -> Call:
        return (
            ops.aten.repeat.default,
            (x, [split.local_size(f"r{i}") if f"r{i}" in copies else 1 for i in range(width)]),
            {},
        )

    return Rule((spec[width - x.ndim :],), (out,), sizes=copies, linear=LINEAR, local=local)


@rule(
    *aten("repeat_interleave.self_int"),
    samples=[lambda: (randn(4, 6), 2, 0), lambda: (randn(4, 6), 3)],
)
def repeat_interleave(
    x: Shaped, repeats: int, dim: int | None = None, *, output_size: int | None = None
) -> Rule:
    """x: [*b, d] -> [*b, (d r)]; without a dim all dims are flattened first."""
    spec = spec_for(x.shape)
    names = ("r",) if repeats != 1 else ()
    if dim is None:
        out: Spec = ((tuple(name for d in spec for name in d[0]) + names,),)
    else:
        dim = wrap(dim, x.ndim)
        out = replaced(spec, dim, ((*spec[dim][0], *names),))

    def local(split: Split, x: Any, repeats: Any, *rest: Any, **kwargs: Any) -> Call:
        count = split.local_size("r") if names else repeats
        return ops.aten.repeat_interleave.self_int, (x, count, dim), {}

    return Rule((spec,), (out,), sizes={"r": repeats}, linear=LINEAR, local=local)


@rule(*aten("view_as_real"), samples=[lambda: (randn(4, 6) + 1j * randn(4, 6),)])
def view_as_real(x: Shaped) -> Rule:
    """x: complex [*b] -> [*b, 2]."""
    spec = spec_for(x.shape)
    return Rule((spec,), ((*spec, (("two",),)),), frozenset({"two"}), linear=LINEAR)


@rule(*aten("view_as_complex"), samples=[lambda: (randn(4, 6, 2),)])
def view_as_complex(x: Shaped) -> Rule:
    """x: [*b, 2] -> complex [*b]."""
    spec = spec_for(x.shape)
    return Rule((spec,), (spec[:-1],), frozenset(spec[-1][0]), linear=LINEAR)


@rule(
    *aten("meshgrid"),
    samples=[lambda: ([randn(4), randn(6)],)],
)
@rule(
    *aten("meshgrid.indexing"),
    samples=[lambda: ([randn(4), randn(6), randn(3)], {"indexing": "xy"})],
)
def meshgrid(tensors: Sequence[Shaped], *, indexing: str = "ij") -> Rule:
    """Each: [n_i] -> all of them [n_0, n_1, ...]."""
    ins = [(factor(f"n{i}", t.shape[0]),) if t.ndim else () for i, t in enumerate(tensors)]
    dims = [spec[0] if spec else ((),) for spec in ins]
    if indexing == "xy":
        dims[:2] = dims[:2][::-1]
    return Rule(tuple(ins), (tuple(dims),) * len(ins), linear=(tuple(range(len(ins))),))
