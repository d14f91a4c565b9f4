"""How one tensor dim is dealt out over a mesh axis: balanced shares of whole units.

A dim is a sum of segments; a segment `(outer, units, inner)` is a product of which `units` is
dealt out.  A plain dim of 8 is `((1, 8, 1),)`; 4 heads of 16 dealt out by head are
`((1, 4, 16),)`; a fused qkv dim is `((1, 8, 16), (1, 2, 16), (1, 2, 16))`; a gate|up dim that a
`view` makes `[2, ffn]` is `((2, ffn, 1),)`.  Rank r owns units `start(r) .. start(r)+share(r)`
of every segment.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

Segment = tuple[int, int, int]
Segments = tuple[Segment, ...]


def share(units: int, size: int, rank: int) -> int:
    """Number of units rank `rank` of `size` owns: the first `units % size` ranks own one more.

    >>> [share(7, 4, r) for r in range(4)]
    [2, 2, 2, 1]
    """
    return units // size + (rank < units % size)


def start(units: int, size: int, rank: int) -> int:
    """First unit of rank `rank`.

    >>> [start(7, 4, r) for r in range(4)]
    [0, 2, 4, 6]
    """
    return rank * (units // size) + min(rank, units % size)


def local_length(segments: Segments, size: int, rank: int) -> int:
    """Length of the dim on one rank."""
    return sum(outer * share(units, size, rank) * inner for outer, units, inner in segments)


def is_even(segments: Segments, size: int) -> bool:
    """Whether every rank owns the same length."""
    return all(units % size == 0 for _, units, _ in segments)


def is_contiguous(segments: Segments, size: int) -> bool:
    """Whether rank order is storage order: equal contiguous chunks of the dim."""
    return len(segments) == 1 and segments[0][0] == 1 and is_even(segments, size)


def take(x: Tensor, dim: int, segments: Segments, size: int, rank: int) -> Tensor:
    """The part of `x` (global along `dim`) that `rank` owns. Differentiable.

    >>> take(torch.arange(8), 0, ((2, 4, 1),), 2, 1).tolist()
    [2, 3, 6, 7]
    """
    parts, offset = [], 0
    for outer, units, inner in segments:
        length = outer * units * inner
        piece = x if len(segments) == 1 else x.narrow(dim, offset, length)
        first, count = start(units, size, rank), share(units, size, rank)
        if outer == 1:
            parts.append(piece.narrow(dim, first * inner, count * inner))
        else:
            grid = piece.unflatten(dim, (outer, units, inner)).narrow(dim + 1, first, count)
            parts.append(grid.flatten(dim, dim + 2))
        offset += length
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def join(parts: Sequence[Tensor], dim: int, segments: Segments) -> Tensor:
    """The global tensor from the parts of all ranks, in rank order. Undoes `take`.

    >>> join([torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7])], 0, ((2, 4, 1),)).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    size = len(parts)
    if len(segments) == 1 and segments[0][0] == 1:
        return torch.cat(list(parts), dim)
    pieces = []
    offsets = [0] * size
    for outer, units, inner in segments:
        grids = []
        for rank, part in enumerate(parts):
            count = share(units, size, rank)
            length = outer * count * inner
            piece = part.narrow(dim, offsets[rank], length)
            grids.append(piece.unflatten(dim, (outer, count, inner)))
            offsets[rank] += length
        pieces.append(torch.cat(grids, dim + 1).flatten(dim, dim + 2))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def boundaries(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(start, end) of consecutive pieces of the given lengths.

    >>> boundaries([2, 3])
    [(0, 2), (2, 5)]
    """
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return list(pairwise(ends))
