"""Objects that a forward fills and hands on from call to call, such as keys and values.

They are recognised by their class: one of its bases is called ...Cache.  A cache given to a call is
changed as the user's forward changes it; the tensors in it are this rank's part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tpcompile.layout import share, start

HEADS = 1
"""The dim of a cache's tensors that may be split: heads or channels, after the batch."""
LENGTHS = {"batch_size", "cumulative_length", "cumulative_length_int", "max_cache_len"}
"""Attributes of caches that count: their values differ from call to call."""

_PARTS = ("Cache", "Layer", "LayerMixin")
_kinds: dict[type, tuple[bool, bool]] = {}


def is_cache(value: Any) -> bool:
    """Whether an argument or output is a cache."""
    return _kind(type(value))[0]


def is_cache_part(value: Any) -> bool:
    """Whether something inside of a cache is made of attributes, as the cache itself is."""
    return _kind(type(value))[1]


def _kind(kind: type) -> tuple[bool, bool]:
    known = _kinds.get(kind)
    if known is None:
        bases = [base for base in kind.__mro__ if base is not object]
        plain = not issubclass(kind, (nn.Module, Mapping, tuple, list, Tensor))
        cache = plain and any(base.__name__.endswith("Cache") for base in bases)
        part = plain and any(base.__name__.endswith(_PARTS) for base in bases)
        known = _kinds[kind] = cache, cache or part
    return known


def is_length(name: str, value: Any) -> bool:
    """Whether an attribute of a cache counts something that differs from call to call."""
    return isinstance(value, torch.SymInt) or (type(value) in (int, Length) and name in LENGTHS)


class Length(int):
    """A number that stands for the tensor that carries it."""

    carrier: Tensor


def carrier_of(length: Any) -> Tensor:
    """An empty tensor with the number as its size, which a trace keeps symbolic."""
    return length.carrier if isinstance(length, Length) else torch.empty(length, 0)


def length_of(carrier: Tensor) -> Any:
    """Undoes `carrier_of`."""
    return carrier.shape[0]


def caches_in(value: Any) -> Iterator[Any]:
    """The caches among arguments, in order; not those inside of caches."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from caches_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from caches_in(each)
    elif is_cache(value):
        yield value


@dataclass(frozen=True)
class Entry:
    """How a tensor of a cache is dealt out: in contiguous chunks of dim `HEADS`."""

    units: int
    inner: int
    """Elements of a unit along the dim."""

    @property
    def size(self) -> int:
        """Of the dim, on all ranks together."""
        return self.units * self.inner

    def local_size(self, degree: int, rank: int) -> int:
        """Of the dim, on one rank."""
        return share(self.units, degree, rank) * self.inner

    def part(self, whole: Tensor, degree: int, rank: int) -> Tensor:
        """A rank's part, with memory of its own."""
        first = start(self.units, degree, rank) * self.inner
        return whole.narrow(HEADS, first, self.local_size(degree, rank)).clone()


Entries = dict[str, Entry | None]
"""Path of a tensor in its cache -> how it is dealt out; None: every rank has it whole."""
