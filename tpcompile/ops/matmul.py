"""Matrix products: linear in each operand, contracted factors are sums."""

from collections.abc import Sequence
from typing import Any

from torch import int32, randn, tensor

from tpcompile.ops.equations import Shaped, aten, each_alone, equation, wrap_all
from tpcompile.rule import DimSpec, Rule, Spec, factors_of, rule


def product(text: str, *tensors: Shaped) -> Rule:
    """The rule of a plain product."""
    return equation(text, *tensors, linear=each_alone(len(tensors)))


@rule(
    *aten("linear"),
    samples=[
        lambda: (randn(2, 6, 8), randn(4, 8)),
        lambda: (randn(6, 8), randn(4, 8)),
        lambda: (randn(8), randn(4, 8)),
        lambda: (randn(2, 6, 8), randn(4, 8), randn(4)),
    ],
)
def linear(x: Shaped, weight: Shaped, bias: Shaped | None = None) -> Rule:
    """x: [*b, k], weight: [n, k] -> [*b, n]. Split n: column parallel. Split k: row parallel.

    A bias would be added once on each rank, so it keeps k whole; a pass splits biases off.
    """
    out = "n" if weight.ndim == 2 else ""
    if bias is None:
        return product(f"*b k, {out} k -> *b {out}", x, weight)
    return equation(f"*b k, {out} k, {out or '.'} -> *b {out}", x, weight, bias, whole="k")


@rule(*aten("mm"), samples=[lambda: (randn(4, 6), randn(6, 8))])
def mm(a: Shaped, b: Shaped) -> Rule:
    """a: [m, k], b: [k, n] -> [m, n]."""
    return product("m k, k n -> m n", a, b)


@rule(*aten("bmm"), samples=[lambda: (randn(4, 6, 8), randn(4, 8, 3))])
def bmm(a: Shaped, b: Shaped) -> Rule:
    """a: [b, m, k], b: [b, k, n] -> [b, m, n]."""
    return product("b m k, b k n -> b m n", a, b)


@rule(*aten("mv"), samples=[lambda: (randn(4, 6), randn(6))])
def mv(a: Shaped, b: Shaped) -> Rule:
    """a: [m, k], b: [k] -> [m]."""
    return product("m k, k -> m", a, b)


@rule(*aten("dot vdot"), samples=[lambda: (randn(6), randn(6))])
def dot(a: Shaped, b: Shaped) -> Rule:
    """a: [k], b: [k] -> []."""
    return product("k, k -> .", a, b)


@rule(*aten("outer ger"), samples=[lambda: (randn(4), randn(6))])
def outer(a: Shaped, b: Shaped) -> Rule:
    """a: [m], b: [n] -> [m, n]."""
    return product("m, n -> m n", a, b)


@rule(
    *aten("matmul"),
    samples=[
        lambda: (randn(2, 4, 6), randn(6, 8)),
        lambda: (randn(2, 1, 4, 6), randn(4, 6, 8)),
        lambda: (randn(2, 4, 6), randn(6)),
        lambda: (randn(6), randn(2, 6, 4)),
        lambda: (randn(6), randn(6)),
        lambda: (randn(6), randn(6, 1)),
    ],
)
def matmul(a: Shaped, b: Shaped) -> Rule:
    """a: [*b, m, k], b: [*b, k, n] -> [*b, m, n]; a 1-D operand has no m (or n)."""
    left = "k" if a.ndim == 1 else "*b m k"
    right = "k" if b.ndim == 1 else "*b k n"
    out = " ".join(word for word in ("*b", "m", "n") if word in f"{left} {right}".split())
    return product(f"{left}, {right} -> {out or '.'}", a, b)


@rule(
    *aten("addmm"),
    samples=[
        lambda: (randn(8), randn(4, 6), randn(6, 8)),
        lambda: (randn(4, 8), randn(4, 6), randn(6, 8), {"beta": 0.5}),
    ],
)
@rule(
    *aten("baddbmm"),
    samples=[
        lambda: (randn(2, 4, 8), randn(2, 4, 6), randn(2, 6, 8)),
        lambda: (randn(8), randn(2, 4, 6), randn(2, 6, 8), {"alpha": 2}),
    ],
)
def addmm(bias: Shaped, a: Shaped, b: Shaped, **kwargs: Any) -> Rule:
    """bias: [*b, m, n], a: [*b, m, k], b: [*b, k, n] -> [*b, m, n]. The bias keeps k whole."""
    words = ["b", "m", "n"][3 - a.ndim :]
    batch = "b " if a.ndim == 3 else ""
    added = " ".join(words[len(words) - bias.ndim :]) or "."
    text = f"{added}, {batch}m k, {batch}k n -> {batch}m n"
    return equation(text, bias, a, b, whole="k", linear=((0, 1), (0, 2)))


@rule(
    *aten("einsum"),
    samples=[
        lambda: ("bshd,bthd->bhst", [randn(2, 3, 4, 6), randn(2, 5, 4, 6)]),
        lambda: ("...k,kn->...n", [randn(2, 3, 4), randn(4, 6)]),
        lambda: ("ij,jk", [randn(4, 6), randn(6, 3)]),
        lambda: ("b...d, bd -> b...", [randn(4, 3, 6), randn(1, 6)]),
        lambda: ("i,i->", [randn(6), randn(6)]),
        lambda: ("ab,bc,cd->ad", [randn(4, 3), randn(3, 6), randn(6, 4)]),
    ],
)
def einsum(equation: str, tensors: Sequence[Shaped], *, path: Any = None) -> Rule | None:
    """The op's own equation; a letter an output lacks is a sum. None for diagonals (`ii`)."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    parts = left.split(",")
    counts = [t.ndim - len(part.replace("...", "")) for part, t in zip(parts, tensors, strict=True)]
    width = max(counts)
    if any(len(set(part) - {"."}) != len(part.replace("...", "")) for part in parts):
        return None
    if not arrow:
        letters = sorted(c for c in set(left) if c.isalpha() and left.count(c) == 1)
        right = ("..." if width else "") + "".join(letters)
    names = [_einsum_names(part, count, width) for part, count in zip(parts, counts, strict=True)]
    ins = tuple(
        tuple(_dim(name, size) for name, size in zip(part, t.shape, strict=True))
        for part, t in zip(names, tensors, strict=True)
    )
    present = factors_of(ins)
    out = tuple(
        ((name,) if name in present else (),) for name in _einsum_names(right, width, width)
    )
    return Rule(ins, (out,), linear=each_alone(len(ins)))


def _einsum_names(part: str, count: int, width: int) -> list[str]:
    """Letters of one operand, the ellipsis spelled out as `.0 .1`, aligned on the right."""
    before, dots, after = part.partition("...")
    spread = [f".{i}" for i in range(width - count, width)] if dots else []
    return [*before, *spread, *after]


def _dim(name: str, size: int) -> DimSpec:
    return ((name,) if size != 1 else (),)


@rule(
    *aten("tensordot"),
    samples=[
        lambda: (randn(2, 4, 6), randn(6, 4, 3), [1, 2], [1, 0]),
        lambda: (randn(2, 6), randn(6, 4), [-1], [0]),
    ],
)
def tensordot(a: Shaped, b: Shaped, dims_self: list[int], dims_other: list[int]) -> Rule:
    """a: [*m, *k], b: [*k, *n] -> [*m, *n], the dims k wherever they are."""
    left, right = wrap_all(dims_self, a.ndim), wrap_all(dims_other, b.ndim)
    if not dims_self:
        left, right = [], []
    ours: list[DimSpec] = [_dim(f"m{i}", size) for i, size in enumerate(a.shape)]
    theirs: list[DimSpec] = [_dim(f"n{i}", size) for i, size in enumerate(b.shape)]
    for i, j in zip(left, right, strict=True):
        ours[i], theirs[j] = _dim(f"k{i}", a.shape[i]), _dim(f"k{i}", b.shape[j])
    kept = [d for i, d in enumerate(ours) if i not in left]
    kept += [d for j, d in enumerate(theirs) if j not in right]
    ins: tuple[Spec, Spec] = (tuple(ours), tuple(theirs))
    return Rule(ins, (tuple(kept),), linear=each_alone(2))


@rule(
    *aten("bilinear"),
    samples=[
        lambda: (randn(2, 3, 4), randn(2, 3, 6), randn(5, 4, 6)),
        lambda: (randn(3, 4), randn(3, 6), randn(5, 4, 6), randn(5)),
    ],
)
def bilinear(a: Shaped, b: Shaped, weight: Shaped, bias: Shaped | None = None) -> Rule:
    """a: [*b, i], b: [*b, j], weight: [n, i, j] -> [*b, n]. A bias keeps i and j whole."""
    if bias is None:
        return product("*b i, *b j, n i j -> *b n", a, b, weight)
    return equation("*b i, *b j, n i j, n -> *b n", a, b, weight, bias, whole="i j")


@rule(
    *aten("_grouped_mm"),
    "transformers.grouped_mm_fallback.default",
    samples=[lambda: (randn(6, 24), randn(3, 24, 24), tensor([2, 2, 6], dtype=int32))],
)
def grouped_mm(
    x: Shaped, weight: Shaped, offs: Shaped | None = None, bias: Shaped | None = None, *rest: Any
) -> Rule | None:
    """x: [t, k] sorted by expert, weight: [e, k, n], offs: [e] -> [t, n]. Split n or k."""
    if x.ndim != 2 or weight.ndim != 3 or offs is None or bias is not None:
        return None
    return equation("t k, e k n, e -> t n", x, weight, offs, whole="t e", linear=each_alone(2))
