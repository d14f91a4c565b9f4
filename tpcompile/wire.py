"""Collectives on plain tensors, without autograd: over a process group or a `LocalGroup`.

The wire carries equal contiguous chunks.  Shares that differ are padded to the longest one, and
the padding is cut off again before anything reads it.
"""

from collections.abc import Sequence
from functools import reduce
from math import prod
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tpcompile.layout import Segments, is_contiguous, join, local_length, take
from tpcompile.local_group import Axis, local_group_for
from tpcompile.torch_private import functional_collectives as ops

Layout = tuple[int, Segments]
"""(dim, segments): which dim of a tensor is split, and how."""


def all_reduce(x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Tensor:
    """Sum or maximum over all ranks, a new contiguous tensor."""
    name, _, rank = axis
    x = x.contiguous()
    if group := local_group_for(axis):
        values = [value for (value,) in group.exchange(rank, f"all_reduce({op})", x)]
        return reduce(torch.add if op == "sum" else torch.maximum, values)
    return ops.wait_tensor(ops.all_reduce(x, op, name))


def all_gather(x: Tensor, axis: Axis, layout: Layout) -> Tensor:
    """The global tensor from every rank's part of it."""
    dim, segments = layout
    size = axis[1]
    if is_contiguous(segments, size):
        stacked = _all_gather_chunks(x.contiguous(), axis)
        if _is_stacked(x.shape, layout):
            return stacked.view(_with_length(x.shape, dim, size * x.shape[dim]))
        return torch.cat(stacked.view(size, *x.shape).unbind(), dim)
    shapes = _part_shapes(x.shape, layout, size)
    longest = max(map(prod, shapes))
    rows = _all_gather_chunks(_pad(x, longest), axis).view(size, longest).unbind()
    return join([_cut(row, shape) for row, shape in zip(rows, shapes, strict=True)], *layout)


def reduce_scatter(x: Tensor, axis: Axis, layout: Layout) -> Tensor:
    """This rank's part of the sum over all ranks, a new contiguous tensor."""
    _, size, rank = axis
    shapes = _part_shapes(x.shape, layout, size)
    if any(shape != shapes[0] for shape in shapes):
        longest = max(map(prod, shapes))
        stacked = torch.cat([_pad(part, longest) for part in _parts(x, layout, size)])
    elif _is_stacked(x.shape, layout):
        stacked = x.reshape(-1)
    else:
        stacked = torch.cat(_parts(x, layout, size)).reshape(-1)  # cat keeps the parts' strides
    return _cut(_reduce_scatter_chunks(stacked, axis), shapes[rank])


def all_to_all(x: Tensor, axis: Axis, source: Layout, target: Layout) -> Tensor:
    """The part split as `target` says of a tensor of which `x` is the part split as `source`."""
    _, size, rank = axis
    sent = _part_shapes(x.shape, target, size)
    received = _part_shapes(sent[rank], source, size)
    if _is_stacked(x.shape, target):
        flat = x.reshape(-1)
    else:
        flat = torch.cat([part.reshape(-1) for part in _parts(x, target, size)])
    counts = list(map(prod, received))
    flat = _all_to_all_pieces(flat, axis, list(map(prod, sent)), counts)
    dim, segments = source
    if _is_stacked(sent[rank], source):
        return flat.view(_with_length(sent[rank], dim, local_length(segments, 1, 0)))
    pieces = zip(flat.split(counts), received, strict=True)
    return join([piece.view(shape) for piece, shape in pieces], dim, segments)


def take_own(x: Tensor, axis: Axis, layout: Layout) -> Tensor:
    """This rank's part of a replicated tensor, a new contiguous tensor.

    Not a view: what autograd saves of it must not keep the whole tensor alive.
    """
    _, size, rank = axis
    return take(x, *layout, size, rank).clone(memory_format=torch.contiguous_format)


def pad_own(x: Tensor, axis: Axis, layout: Layout) -> Tensor:
    """The global tensor that holds this rank's part and is zero elsewhere."""
    _, size, rank = axis
    shapes = _part_shapes(x.shape, layout, size)
    return join([x if r == rank else x.new_zeros(shape) for r, shape in enumerate(shapes)], *layout)


def _all_gather_chunks(x: Tensor, axis: Axis) -> Tensor:
    """[n, ...] on every rank -> [size * n, ...]."""
    name, size, rank = axis
    if group := local_group_for(axis):
        return torch.cat([chunk for (chunk,) in group.exchange(rank, "all_gather", x)])
    return ops.wait_tensor(ops.all_gather_into_tensor(x, size, name))


def _reduce_scatter_chunks(x: Tensor, axis: Axis) -> Tensor:
    """[size * n] on every rank -> this rank's [n] of the sum."""
    name, size, rank = axis
    if group := local_group_for(axis):
        chunks = x.view(size, -1).unbind()
        return reduce(torch.add, [c[rank] for c in group.exchange(rank, "reduce_scatter", *chunks)])
    return ops.wait_tensor(ops.reduce_scatter_tensor(x, "sum", size, name))


def _all_to_all_pieces(x: Tensor, axis: Axis, sent: list[int], received: list[int]) -> Tensor:
    """A piece [n, ...] for every rank, concatenated -> the pieces from every rank."""
    name, _, rank = axis
    if group := local_group_for(axis):
        pieces = group.exchange(rank, "all_to_all", *x.split(sent))
        return torch.cat([from_rank[rank] for from_rank in pieces])
    if x.is_complex():  # gloo has no complex all-to-all
        real = torch.view_as_real(x.resolve_conj())
        return torch.view_as_complex(_all_to_all_pieces(real, axis, sent, received))
    return ops.wait_tensor(ops.all_to_all_single(x, received, sent, name))


def _parts(x: Tensor, layout: Layout, size: int) -> list[Tensor]:
    """The parts of all ranks of a tensor that is global along the layout's dim."""
    return [take(x, *layout, size, rank) for rank in range(size)]


def _part_shapes(shape: Sequence[int], layout: Layout, size: int) -> list[list[int]]:
    """Shape of every rank's part of a tensor, whose own length along the dim does not matter."""
    dim, segments = layout
    return [_with_length(shape, dim, local_length(segments, size, r)) for r in range(size)]


def _with_length(shape: Sequence[int], dim: int, length: int) -> list[int]:
    return [*shape[:dim], length, *shape[dim + 1 :]]


def _is_stacked(shape: Sequence[int], layout: Layout) -> bool:
    """Whether the flat parts of all ranks, one after the other, are the flat global tensor."""
    dim, segments = layout
    return len(segments) == 1 and segments[0][0] == 1 and all(n == 1 for n in shape[:dim])


def _pad(x: Tensor, length: int) -> Tensor:
    """The flat tensor, zeros appended."""
    flat = x.reshape(-1)
    return flat if len(flat) == length else F.pad(flat, (0, length - len(flat)))


def _cut(flat: Tensor, shape: list[int]) -> Tensor:
    """The tensor of the given shape that a flat one starts with."""
    return flat.narrow(0, 0, prod(shape)).view(shape)
