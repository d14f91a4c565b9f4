"""How one parameter is stored: an even `Shard(dim)` whose chunks are what each rank needs.

The *storage* of a parameter is the original indexed so that contiguous equal chunks along `dim`
are the ranks' parts, each padded at its end with zeros to the longest one.  For most parameters
that is the original itself (`is_identity`); for fused weights it is shard-major order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpcompile.layout import Segments, is_contiguous, local_length, share, start


class Run(NamedTuple):
    """A slice of the original that is contiguous on one rank too."""

    original: int
    """First index in the original, along the layout's dim."""
    local: int
    """First index in the rank's part."""
    length: int


@lru_cache(maxsize=4096)  # asked for every parameter at every step
def _padded_ranks(segments: Segments, size: int) -> frozenset[int]:
    """Ranks whose parts are shorter than the longest."""
    lengths = [local_length(segments, size, rank) for rank in range(size)]
    return frozenset(rank for rank, length in enumerate(lengths) if length < max(lengths))


@dataclass(frozen=True)
class ParamLayout:
    """Where every element of a parameter is stored on a mesh axis of `size` ranks.

    >>> qkv = ParamLayout.sharded((6, 4), 0, ((1, 2, 1), (1, 4, 1)), size=2)
    >>> qkv.local_shape(), list(qkv.runs(1))
    ((3, 4), [Run(original=1, local=0, length=1), Run(original=4, local=1, length=2)])
    """

    shape: tuple[int, ...]
    """Original shape."""
    dim: int | None
    """The dim that is dealt out; None: replicated."""
    segments: Segments
    """How `dim` is dealt out; empty where replicated."""
    size: int
    """Degree of the mesh axis."""

    @classmethod
    def replicated(cls, shape: Sequence[int], size: int) -> "ParamLayout":
        """Every rank stores the whole parameter."""
        return cls(tuple(shape), None, (), size)

    @classmethod
    def sharded(
        cls, shape: Sequence[int], dim: int, segments: Segments, size: int
    ) -> "ParamLayout":
        """Every rank stores its shares of the segments of `dim` (0 or more)."""
        length = sum(outer * units * inner for outer, units, inner in segments)
        assert length == shape[dim], f"segments of {length} for dim {dim} of {list(shape)}"
        return cls(tuple(shape), dim, segments, size)

    def real_length(self, rank: int) -> int:
        """Length of the rank's part along `dim`, without padding."""
        assert self.dim is not None
        return local_length(self.segments, self.size, rank)

    def local_shape(self) -> tuple[int, ...]:
        """Shape of every rank's part, padding included."""
        if self.dim is None:
            return self.shape
        longest = max(self.real_length(rank) for rank in range(self.size))
        return (*self.shape[: self.dim], longest, *self.shape[self.dim + 1 :])

    def storage_shape(self) -> tuple[int, ...]:
        """Shape of all ranks' parts in a row, padding included."""
        local = self.local_shape()
        if self.dim is None:
            return local
        return (*local[: self.dim], self.size * local[self.dim], *local[self.dim + 1 :])

    def is_identity(self) -> bool:
        """Whether the storage is the original."""
        return self.dim is None or self.size == 1 or is_contiguous(self.segments, self.size)

    def is_padded(self, rank: int) -> bool:
        """Whether the rank's part ends in padding."""
        return self.dim is not None and rank in _padded_ranks(self.segments, self.size)

    def runs(self, rank: int) -> Iterator[Run]:
        """The rank's part as slices of the original, in the order of both."""
        original = local = 0
        for outer, units, inner in self.segments:
            first, length = start(units, self.size, rank), share(units, self.size, rank) * inner
            for piece in range(outer if length else 0):
                yield Run(original + (piece * units + first) * inner, local, length)
                local += length
            original += outer * units * inner

    def to_local(self, full: Tensor, rank: int) -> Tensor:
        """The rank's part of the original: own contiguous memory, zeros as padding.

        Copied slice by slice, so that nothing but `full` and the part itself takes memory.
        """
        if self.dim is None:
            return full.detach().clone(memory_format=torch.contiguous_format)
        new = full.new_zeros if self.is_padded(rank) else full.new_empty
        part = new(self.local_shape(), requires_grad=False)
        for run in self.runs(rank):
            piece = full.detach().narrow(self.dim, run.original, run.length)
            part.narrow(self.dim, run.local, run.length).copy_(piece)
        return part

    def from_locals(self, parts: Sequence[Tensor]) -> Tensor:
        """The original from the parts of all ranks, in rank order. Undoes `to_local`."""
        if self.dim is None:
            return parts[0].detach().clone()
        full = parts[0].new_empty(self.shape, requires_grad=False)
        for rank, part in enumerate(parts):
            for run in self.runs(rank):
                piece = part.detach().narrow(self.dim, run.local, run.length)
                full.narrow(self.dim, run.original, run.length).copy_(piece)
        return full

    def from_storage(self, storage: Tensor) -> Tensor:
        """The original from all parts in a row; `storage` itself where that is the original."""
        if self.is_identity():
            return storage
        assert self.dim is not None
        return self.from_locals(storage.chunk(self.size, self.dim))

    def to_storage(self, full: Tensor) -> Tensor:
        """All parts in a row; `full` itself where that is the storage."""
        if self.is_identity():
            return full
        assert self.dim is not None
        return torch.cat([self.to_local(full, rank) for rank in range(self.size)], self.dim)

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        return {
            "shape": list(self.shape),
            "dim": self.dim,
            "segments": [list(segment) for segment in self.segments],
            "size": self.size,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "ParamLayout":
        """Undoes `to_json`."""
        segments = tuple((outer, units, inner) for outer, units, inner in data["segments"])
        return cls(tuple(data["shape"]), data["dim"], segments, data["size"])
