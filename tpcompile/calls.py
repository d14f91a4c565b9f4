"""What a call of the model is made of, cheap enough for every step and plain enough to trace."""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from tpcompile.caches import Length, carrier_of, is_cache, is_cache_part, is_length
from tpcompile.structure import Constant

CONSTANTS = (type(None), bool, int, float, str)
"""Types of arguments that are part of a call's description by value."""


def describe(
    values: Iterable[Any], tensors: list[Tensor], caches: list[Any] | None = None
) -> tuple[Hashable, ...] | None:
    """One entry for each value, equal for calls that differ in nothing but the tensors.

    The values' tensors are added to `tensors` in order, those in lists, tuples and dicts too, and
    in caches, which are added to `caches` if that is given.  None where some value is of another
    type: then only `capture_inputs.bind` can tell.

    >>> tensors = []
    >>> describe([torch.ones(2, 3), {"mask": None}], tensors), len(tensors)
    ((('tensor', torch.float32, 2, False), ('dict', ('mask',), (('NoneType', None),))), 1)
    """
    found: list[Hashable] = []
    for value in values:
        kind = type(value)
        if isinstance(value, Tensor):
            tensors.append(value)
            found.append(("tensor", value.dtype, value.ndim, value.requires_grad))
        elif kind in CONSTANTS:
            found.append((kind.__name__, value))
        elif kind in (list, tuple, dict):
            inner = describe(value.values() if kind is dict else value, tensors, caches)
            if inner is None:
                return None
            names = tuple(value) if kind is dict else ()
            found.append((kind.__name__, names, inner))
        elif caches is not None and is_cache(value):
            caches.append(value)
            found.append(_describe_inside("", value, tensors))
        elif caches is not None and is_dataclass(kind) and issubclass(kind, dict):
            inner = describe(value.values(), tensors, caches)
            if inner is None:
                return None
            found.append(("output", kind, tuple(value), inner))
        else:
            return None
    return tuple(found)


def _describe_inside(name: str, value: Any, tensors: list[Tensor]) -> tuple[Hashable, ...]:
    """The entry of something in a cache."""
    kind = type(value)
    if isinstance(value, Tensor):
        tensors.append(value)
        return "tensor", value.dtype, value.ndim, value.requires_grad
    if is_length(name, value):
        tensors.append(carrier_of(value))
        return ("length",)
    if kind in (list, tuple):
        return kind.__name__, (), tuple(_describe_inside("", each, tensors) for each in value)
    if kind is dict or is_cache_part(value):
        items = value if kind is dict else vars(value)
        inner = tuple(_describe_inside(n, each, tensors) for n, each in items.items())
        return ("dict" if kind is dict else kind), tuple(items), inner
    return "constant", Constant(value)


def rebuild(description: tuple[Any, ...], tensors: Iterator[Any]) -> list[Any]:
    """Values of this description, their tensors taken in order. Undoes `describe`."""
    values: list[Any] = []
    for kind, *rest in description:
        if kind == "tensor":
            values.append(next(tensors))
        elif kind in ("list", "tuple", "dict"):
            names, inner = rest
            below = rebuild(inner, tensors)
            whole = dict(zip(names, below, strict=True)) if kind == "dict" else below
            values.append(tuple(below) if kind == "tuple" else whole)
        elif kind == "output":
            of, names, inner = rest
            values.append(of(**dict(zip(names, rebuild(inner, tensors), strict=True))))
        elif kind == "length":
            values.append(Length(1))
            values[-1].carrier = next(tensors)
        elif isinstance(kind, type):
            names, inner = rest
            values.append(object.__new__(kind))
            vars(values[-1]).update(zip(names, rebuild(inner, tensors), strict=True))
        else:
            values.append(rest[0].value if kind == "constant" else rest[0])
    return values


def examples(
    description: tuple[Any, ...], device: str, sizes: Iterable[tuple[int, ...]] = ()
) -> list[Tensor]:
    """Zeros of a description's types and these sizes (all 1 if none are given)."""
    shapes = iter(sizes)
    made: list[Tensor] = []
    for kind, *rest in description:
        if kind == "tensor":
            dtype, ndim, requires_grad = rest
            zeros = torch.zeros(next(shapes, (1,) * ndim), dtype=dtype, device=device)
            made.append(zeros.requires_grad_(requires_grad))
        elif kind == "length":
            made.append(torch.zeros(1, 0))
        elif kind in ("list", "tuple", "dict", "output") or isinstance(kind, type):
            made += examples(rest[-1], device, shapes)
    return made
