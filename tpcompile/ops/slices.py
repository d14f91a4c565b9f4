"""Ops that cut a dim or put dims together: the dim is a sum of pieces."""

from collections.abc import Sequence
from typing import Any

from torch import ops, randn, zeros

from tpcompile.ops.equations import Shaped, aten, factor, is_cut, names_in, replaced, spec_for, wrap
from tpcompile.rule import Call, DimSpec, Rule, Spec, Split, rule

LINEAR = ((0,),)


def _whole_dim(x: Shaped, dim: int, out_size: int, **fields: Any) -> Rule:
    """x: [*b, n] -> [*b, m], where nothing is said of n and m but that they are whole."""
    spec = spec_for(x.shape)
    out = replaced(spec, dim, factor("m", out_size))
    return Rule((spec,), (out,), names_in((spec[dim], out[dim])), linear=LINEAR, **fields)


@rule(
    *aten("slice.Tensor"),
    samples=[
        lambda: (randn(4, 12), 1, 0, 8),
        lambda: (randn(4, 12), -1, 2, -4),
        lambda: (randn(4, 12), 1, -3, 9223372036854775807),
        lambda: (randn(4, 12), 0),
        lambda: (randn(4, 12), 1, 1, None, 2),
        lambda: (randn(4, 12), 1, 1, 9, 3),
        lambda: (randn(4, 12), 1, -1, None),
    ],
)
def slice_(
    x: Shaped, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Rule:
    """x: [*b, (before + m + after)] -> [*b, m]. With a step: [*b, (m step)] -> [*b, m]."""
    dim = wrap(dim, x.ndim)
    size = x.shape[dim]
    first, last = _bound(start, 0, size), _bound(end, size, size)
    spec, length = spec_for(x.shape), max(last - first, 0)
    if length == size and step == 1:
        return Rule((spec,), (spec,), linear=LINEAR)
    if step != 1:
        return _stepped(x, dim, first, last, step)
    sizes = {"before": first, "m": length, "after": size - last}
    pieces = tuple((name,) for name, length in sizes.items() if length)
    if length == 0 or 1 in sizes.values():
        return _whole_dim(x, dim, length)
    before: DimSpec = (("before",),)

    def local(split: Split, x: Any, *args: Any, **kwargs: Any) -> Call:
        if not is_cut(split, pieces):
            return ops.aten.slice.Tensor, (x, *args), kwargs
        begin = split.length(before) if first else 0
        end = split.length((*before, ("m",)) if first else (("m",),))
        return ops.aten.slice.Tensor, (x, dim, begin, end), {}

    del sizes["m"]
    return Rule(
        (replaced(spec, dim, pieces),),
        (replaced(spec, dim, (("m",),)),),
        sizes={name: size for name, size in sizes.items() if size},
        linear=LINEAR,
        local=local,
    )


def _stepped(x: Shaped, dim: int, first: int, last: int, step: int) -> Rule:
    size = x.shape[dim]
    count = max(-(-(last - first) // step), 0)
    if size % step or first >= step or last != size or count <= 1:
        return _whole_dim(x, dim, count)
    spec = spec_for(x.shape)
    return Rule(
        (replaced(spec, dim, (("m", "step"),)),),
        (replaced(spec, dim, (("m",),)),),
        frozenset({"step"}),
        sizes={"step": step},
        linear=LINEAR,
    )


def _bound(index: int | None, default: int, size: int) -> int:
    index = default if index is None else index
    return min(max(index + size if index < 0 else index, 0), size)


@rule(
    *aten("narrow"),
    samples=[lambda: (randn(4, 12), 1, 2, 6), lambda: (randn(4, 12), -1, 0, 12)],
)
def narrow(x: Shaped, dim: int, start: int, length: int) -> Rule:
    """x: [*b, (before + m + after)] -> [*b, m]."""
    start = start + x.shape[dim] if start < 0 else start
    made = slice_(x, dim, start, start + length)

    at = made.ins[0][wrap(dim, x.ndim)]

    def local(split: Split, x: Any, *args: Any) -> Call:
        if not is_cut(split, at):
            return ops.aten.narrow.default, (x, *args), {}
        return made.local(split, x) if made.local else (ops.aten.alias.default, (x,), {})

    return Rule(made.ins, made.outs, made.whole, sizes=made.sizes, linear=LINEAR, local=local)


def _pieces(x: Shaped, lengths: Sequence[int], dim: int) -> Rule:
    """x: [*b, (p0 + p1)] -> [*b, p0], [*b, p1]. Pieces of size 1 keep the dim whole."""
    spec, dim = spec_for(x.shape), wrap(dim, x.ndim)
    if len(lengths) == 1:
        return Rule((spec,), (spec,), linear=LINEAR)
    dims = [factor(f"p{i}", length) for i, length in enumerate(lengths)]
    outs = tuple(replaced(spec, dim, d) for d in dims)
    if min(lengths) <= 1:
        return Rule((spec,), outs, names_in((spec[dim], *dims)), linear=LINEAR)
    total: DimSpec = tuple(d[0] for d in dims)

    def local(split: Split, x: Any, *args: Any, **kwargs: Any) -> Call:
        sizes = [split.length(d) for d in dims]
        return ops.aten.split_with_sizes.default, (x, sizes, dim), {}

    return Rule((replaced(spec, dim, total),), outs, linear=LINEAR, local=local)


@rule(
    *aten("split_with_sizes split.sizes"),
    samples=[lambda: (randn(4, 12), [6, 2, 4], 1), lambda: (randn(4, 3), [3, 1])],
)
def split_with_sizes(x: Shaped, sizes: Sequence[int], dim: int = 0) -> Rule:
    """x: [*b, (p0 + p1)] -> [*b, p0], [*b, p1]."""
    return _pieces(x, sizes, dim)


@rule(
    *aten("split.Tensor"),
    samples=[lambda: (randn(4, 12), 4, -1), lambda: (randn(7, 3), 4), lambda: (randn(4, 3), 1, 1)],
)
def split(x: Shaped, split_size: int, dim: int = 0) -> Rule:
    """x: [*b, (p0 + p1)] -> [*b, p0], [*b, p1], all but the last of one size."""
    size = x.shape[dim]
    return _pieces(x, [min(split_size, size - i) for i in range(0, size, split_size)] or [0], dim)


@rule(
    *aten("chunk unsafe_chunk"),
    samples=[lambda: (randn(4, 12), 3, -1), lambda: (randn(7, 3), 2)],
)
def chunk(x: Shaped, chunks: int, dim: int = 0) -> Rule:
    """x: [*b, (p0 + p1)] -> [*b, p0], [*b, p1], all but the last of one size."""
    return split(x, max(-(-x.shape[dim] // chunks), 1), dim)


@rule(*aten("select.int"), samples=[lambda: (randn(4, 6), 0, 1), lambda: (randn(4, 6), -1, -2)])
def select(x: Shaped, dim: int, index: int) -> Rule:
    """x: [*b, n] -> [*b]. n whole."""
    spec, dim = spec_for(x.shape), wrap(dim, x.ndim)
    return Rule((spec,), (replaced(spec, dim),), names_in((spec[dim],)), linear=LINEAR)


@rule(*aten("unbind.int"), samples=[lambda: (randn(3, 6),), lambda: (randn(4, 2, 6), 1)])
def unbind(x: Shaped, dim: int = 0) -> Rule:
    """x: [*b, n] -> n times [*b]. n whole."""
    made = select(x, dim, 0)
    return Rule(made.ins, made.outs * x.shape[dim], made.whole, linear=LINEAR)


@rule(*aten("glu"), samples=[lambda: (randn(4, 12),), lambda: (randn(8, 6), 0)])
def glu(x: Shaped, dim: int = -1) -> Rule:
    """x: [*b, (two m)] -> [*b, m]."""
    spec, dim = spec_for(x.shape), wrap(dim, x.ndim)
    size = x.shape[dim] // 2
    out = replaced(spec, dim, factor("m", size))
    ins = replaced(spec, dim, (("two", "m") if size != 1 else ("two",),))
    return Rule((ins,), (out,), frozenset({"two"}), sizes={"two": 2})


@rule(
    *aten("cat concat concatenate"),
    samples=[
        lambda: ([randn(4, 6), randn(2, 6), randn(4, 6)],),
        lambda: ([randn(4, 6), randn(4, 3)], -1),
        lambda: ([randn(2, 1, 6), randn(2, 4, 6)], 1),
        lambda: ([zeros(0), randn(4, 6)], -1),
    ],
)
def cat(tensors: Sequence[Shaped], dim: int = 0) -> Rule:
    """[*b, p0], [*b, p1] -> [*b, (p0 + p1)]. Pieces of size 1 keep the dim whole."""
    # An empty 1-D tensor joins tensors of any rank (a cache before its first step).
    is_empty = [tuple(t.shape) == (0,) for t in tensors]
    if all(is_empty):
        is_empty = [False] * len(is_empty)
    base = spec_for(tensors[is_empty.index(False)].shape)
    dim = wrap(dim, len(base))
    ins: list[Spec] = []
    lengths = []
    for i, (t, empty) in enumerate(zip(tensors, is_empty, strict=True)):
        lengths.append(0 if empty else t.shape[dim])
        piece = factor(f"p{i}", lengths[-1])
        ins.append((piece,) if empty else replaced(base, dim, piece))
    linear = (tuple(range(len(ins))),)
    if len(ins) == 1:
        return Rule((base,), (base,), linear=linear)
    if min(lengths) <= 1:
        out = replaced(base, dim, factor("total", sum(lengths)))
        pieces = [spec[0 if e else dim] for spec, e in zip(ins, is_empty, strict=True)]
        return Rule(tuple(ins), (out,), names_in((*pieces, out[dim])), linear=linear)
    total: DimSpec = tuple(spec[dim][0] for spec in ins)
    return Rule(tuple(ins), (replaced(base, dim, total),), linear=linear)


@rule(
    *aten("stack"),
    samples=[lambda: ([randn(4, 6), randn(4, 6)],), lambda: ([randn(4), randn(4), randn(4)], -1)],
)
def stack(tensors: Sequence[Shaped], dim: int = 0) -> Rule:
    """Equal [*b], n of them -> [*b, n]. n whole."""
    spec = spec_for(tensors[0].shape)
    dim = wrap(dim, len(spec) + 1)
    new = factor("n", len(tensors))
    linear = (tuple(range(len(tensors))),)
    out = (*spec[:dim], new, *spec[dim:])
    return Rule((spec,) * len(tensors), (out,), names_in((new,)), linear=linear)


@rule(
    *aten("pad"),
    samples=[
        lambda: (randn(4, 6), [1, 2]),
        lambda: (randn(4, 6), [0, 0, 0, 3], "constant", 1.5),
        lambda: (randn(2, 4, 6), [1, 1], "reflect"),
    ],
)
@rule(*aten("constant_pad_nd"), samples=[lambda: (randn(4, 6), [1, 2])])
def pad(x: Shaped, pad: Sequence[int], mode: Any = "constant", value: float | None = None) -> Rule:
    """x: [*b, n] -> [*b, m]. Padded dims are whole."""
    spec = list(spec_for(x.shape))
    out, whole = list(spec), []
    for i in range(len(pad) // 2):
        dim, extra = x.ndim - 1 - i, pad[2 * i] + pad[2 * i + 1]
        if pad[2 * i] or pad[2 * i + 1]:
            out[dim] = factor(f"m{dim}", x.shape[dim] + extra)
            whole += [spec[dim], out[dim]]
    fills = value if mode == "constant" else 0 if isinstance(mode, str) else mode
    linear = () if fills else LINEAR
    return Rule((tuple(spec),), (tuple(out),), names_in(whole), linear=linear)
