"""The words rules are written in: equations over shapes, broadcasting, and dims that drop out."""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any, Protocol

import torch

from tpcompile.rule import DimSpec, Rule, Spec, Split, factors_of


class Shaped(Protocol):
    """What a rule function sees of a tensor."""

    shape: tuple[int, ...]
    ndim: int
    dtype: torch.dtype


def aten(names: str) -> list[Any]:
    """ATen overloads by name, parted by blanks; a name without overload means `default`.

    >>> [str(op) for op in aten("relu add.Tensor")]
    ['aten.relu.default', 'aten.add.Tensor']
    """
    ops = []
    for name in names.split():
        packet, _, overload = name.partition(".")
        ops.append(getattr(getattr(torch.ops.aten, packet), overload or "default"))
    return ops


def is_tensor(value: Any) -> bool:
    """Whether an argument of a rule function stands for a tensor."""
    return hasattr(value, "ndim")


def tensors_of(args: Iterable[Any]) -> list[Any]:
    """The tensors among arguments, lists flattened."""
    found: list[Any] = []
    for arg in args:
        if is_tensor(arg):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found.extend(tensors_of(arg))
    return found


def equation(text: str, *tensors: Shaped, **fields: Any) -> Rule:
    """A rule for operands of these shapes.

    `*b` stands for as many dims as its operand has left, aligned on the right and broadcast.
    A dim of size 1 belongs to no factor.  `fields` are those of `Rule.parse`;
    sets may name factors that have gone.

    >>> x, w = torch.empty(2, 1, 6, 8), torch.empty(4, 8)
    >>> str(equation("*b k, n k -> *b n", x, w))
    'b0 1 b2 k, n k -> b0 1 b2 n'
    """
    ins, outs = _specs(text, tuple(tuple(t.shape) for t in tensors))
    known = factors_of(ins) | factors_of(outs)
    for field in ("whole", "plain", "inner"):
        if field in fields:
            fields[field] = frozenset(_matching(fields[field].split(), known))
    if "sizes" in fields:
        fields["sizes"] = {name: n for name, n in fields["sizes"].items() if name in known}
    return Rule(ins, outs, **fields)


@lru_cache(maxsize=4096)
def _specs(text: str, shapes: tuple[tuple[int, ...], ...]) -> tuple[tuple[Spec, ...], ...]:
    left, right = text.split("->")
    parts = [_WORD.findall(part) for part in left.split(",")] if left.strip() else []
    width = 0
    for words, shape in zip(parts, shapes, strict=True):
        if any(word[0] == "*" for word in words):
            width = max(width, len(shape) - len(words) + 1)
    ins = [
        _spread(words, len(shape) - len(words) + 1, width)
        for words, shape in zip(parts, shapes, strict=True)
    ]
    outs = [_spread(_WORD.findall(part), width, width) for part in right.split(",")]
    rule = Rule.parse(f"{', '.join(ins)} -> {', '.join(outs)}")
    kept = tuple(
        tuple(dim if size != 1 else ((),) for dim, size in zip(spec, shape, strict=True))
        for spec, shape in zip(rule.ins, shapes, strict=True)
    )
    # A factor that every operand has with size 1 has gone from the operands; it goes from the
    # outputs as well. One that no operand ever had (an expanded dim) stays.
    gone = factors_of(rule.ins) - factors_of(kept)
    return kept, tuple(tuple(_drop(dim, gone) for dim in spec) for spec in rule.outs)


_WORD = re.compile(r"\([^)]*\)|[^\s]+")


def _spread(words: list[str], count: int, width: int) -> str:
    """Equation text of one tensor with its starred word spelled out."""
    out: list[str] = []
    for word in words:
        if word[0] == "*":
            out.extend(f"{word[1:]}{i}" for i in range(width - count, width))
        else:
            out.append(word)
    return " ".join(word for word in out if word != ".") or "."


def _drop(dim: DimSpec, gone: set[str]) -> DimSpec:
    return tuple(tuple(name for name in term if name not in gone) for term in dim)


def _matching(names: Iterable[str], known: set[str]) -> Iterator[str]:
    """The known factors among names; `*s` names all those that `*s` stands for."""
    for name in names:
        if name[0] == "*":
            yield from (f for f in known if f.rstrip("0123456789") == name[1:])
        elif name in known:
            yield name


def spec_for(shape: Sequence[int], prefix: str = "i") -> Spec:
    """One factor per dim, named after its position.

    >>> spec_for((2, 1, 3))
    ((('i0',),), ((),), (('i2',),))
    """
    return tuple(((f"{prefix}{i}",) if size != 1 else (),) for i, size in enumerate(shape))


def factor(name: str, size: int) -> DimSpec:
    """The dim that is one factor; of size 1, none."""
    return ((name,) if size != 1 else (),)


def broadcast(shapes: Sequence[Sequence[int]], prefix: str = "i") -> tuple[list[Spec], Spec]:
    """(operand specs, output spec) of tensors broadcast together.

    >>> broadcast([(2, 1), (3,)])[0]
    [((('i0',),), ((),)), ((('i1',),),)]
    """
    width = max((len(shape) for shape in shapes), default=0)
    sizes = [1] * width
    for shape in shapes:
        for i, size in enumerate(shape, width - len(shape)):
            if size != 1:
                sizes[i] = size
    out = spec_for(sizes, prefix)
    ins = [
        tuple(out[i] if size != 1 else ((),) for i, size in enumerate(shape, width - len(shape)))
        for shape in shapes
    ]
    return ins, out


def wrap(dim: int, ndim: int) -> int:
    """The dim counted from the front."""
    return dim + ndim if dim < 0 else dim


def wrap_all(dims: int | Sequence[int] | None, ndim: int) -> list[int]:
    """Dims counted from the front; None or none given means all."""
    if dims is None or ndim == 0 or (not isinstance(dims, int) and not len(dims)):
        return list(range(ndim))
    return [wrap(dim, ndim) for dim in ([dims] if isinstance(dims, int) else dims)]


def reduced(spec: Spec, dims: Sequence[int], keepdim: bool) -> Spec:
    """The spec with some dims gone, or of size 1."""
    if keepdim:
        return tuple(((),) if i in dims else dim for i, dim in enumerate(spec))
    return tuple(dim for i, dim in enumerate(spec) if i not in dims)


def replaced(spec: Spec, dim: int, *new: DimSpec) -> Spec:
    """The spec with one dim replaced by others."""
    return (*spec[:dim], *new, *spec[dim + 1 :])


def names_in(dims: Iterable[DimSpec]) -> frozenset[str]:
    """Factor names of some dims."""
    return frozenset(name for dim in dims for term in dim for name in term)


def is_cut(split: Split, dim: DimSpec) -> bool:
    """Whether a factor of the dim is split."""
    return any(split.is_split(name) for term in dim for name in term)


def local_shape(split: Split, spec: Spec) -> list[Any]:
    """Literal local shape; -1 for the split dim where there is one, so that no size is computed."""
    cuts = [is_cut(split, dim) for dim in spec]
    if sum(cuts) == 1:
        return [-1 if cut else split.length(dim) for cut, dim in zip(cuts, spec, strict=True)]
    return [split.length(dim) for dim in spec]


def numel(shape: Sequence[int]) -> int:
    """Number of elements."""
    return prod(shape)


def each_alone(count: int) -> tuple[tuple[int, ...], ...]:
    """`linear` of an op that is linear in each of `count` operands by itself."""
    return tuple((i,) for i in range(count))
