"""What a call of the model is made of, cheap enough for every step and plain enough to trace."""

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

CONSTANTS = (type(None), bool, int, float, str)
"""Types of arguments that are part of a call's description by value."""


def describe(values: Iterable[Any], tensors: list[Tensor]) -> tuple[Hashable, ...] | None:
    """One entry for each value, equal for calls that differ in nothing but the tensors.

    The values' tensors are added to `tensors` in order, those in lists, tuples and dicts too.
    None where some value is of another type: then only `flatten_inputs` can tell.

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
            inner = describe(value.values() if kind is dict else value, tensors)
            if inner is None:
                return None
            names = tuple(value) if kind is dict else ()
            found.append((kind.__name__, names, inner))
        else:
            return None
    return tuple(found)


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
        else:
            values.append(rest[0])
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
        elif kind in ("list", "tuple", "dict"):
            made += examples(rest[1], device, shapes)
    return made
