"""Collectives on plain tensors, without autograd: over a process group or a `LocalGroup`.

Each runs at once (`all_gather`) or is started (`start_all_gather`), to be waited for when
something reads the result.  The wire carries equal contiguous chunks.  Shares that differ are
padded to the longest one, and the padding is cut off again before anything reads it.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpcompile.layout import Segments, is_contiguous, join, local_length, take
from tpcompile.local_group import Axis, local_group_for
from tpcompile.torch_private import functional_collectives as ops
from tpcompile.torch_private import group_for

Layout = tuple[int, Segments]
"""(dim, segments): which dim of a tensor is split, and how."""
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Started:
    """A collective on its way. Its operand must not change before `wait` gives the result."""

    def __init__(self, result: Tensor, complete: bool = False) -> None:
        """`complete` says that nothing is left to wait for."""
        self.result, self.complete = result, complete
        self.work: dist.Work | None = None
        self._finish: Callable[[Tensor], Tensor] | None = None

    def then(self, finish: Callable[[Tensor], Tensor]) -> "Started":
        """The same, with its result put in shape by `finish`."""
        assert self._finish is None
        self._finish = finish
        return self

    def wait(self) -> Tensor:
        """The result, complete."""
        result = self.result
        if self.work is not None:
            self.work.wait()
        elif not self.complete:
            result = ops.wait_tensor(result)
        return result if self._finish is None else self._finish(result)


def _sent(result: Tensor, work: Any) -> Started:
    """What torch.distributed has started; functional collectives are for compilers, and slower."""
    started = Started(result)
    started.work = work
    return started


def _functional(x: Tensor) -> bool:
    return torch.compiler.is_compiling() or x.is_complex() or not x.numel()


def all_reduce(x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Tensor:
    """Sum or maximum over all ranks, a new contiguous tensor."""
    return start_all_reduce(x, axis, op).wait()


def all_gather(x: Tensor, axis: Axis, layout: Layout) -> Tensor:
    """The global tensor from every rank's part of it."""
    return start_all_gather(x, axis, layout).wait()


def reduce_scatter(x: Tensor, axis: Axis, layout: Layout) -> Tensor:
    """This rank's part of the sum over all ranks, a new contiguous tensor."""
    return start_reduce_scatter(x, axis, layout).wait()


def all_to_all(x: Tensor, axis: Axis, source: Layout, target: Layout) -> Tensor:
    """The part split as `target` says of a tensor of which `x` is the part split as `source`."""
    return start_all_to_all(x, axis, source, target).wait()


def start_all_reduce(x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Started:
    """Start `all_reduce`."""
    name, _, rank = axis
    x = x.contiguous()
    if group := local_group_for(axis):
        values = [value for (value,) in group.exchange(rank, f"all_reduce({op})", x)]
        return Started(reduce(torch.add if op == "sum" else torch.maximum, values), complete=True)
    if _functional(x):
        return Started(ops.all_reduce(x, op, name))
    return _sent(out := x.clone(), dist.all_reduce(out, _OPS[op], group_for(name), async_op=True))


def start_all_reduce_(x: Tensor, axis: Axis) -> Started:
    """Start the sum over all ranks in place; `x` is contiguous and nothing else reads it."""
    if local_group_for(axis):
        return Started(x.copy_(all_reduce(x, axis)), complete=True)
    if _functional(x):
        return Started(ops.all_reduce_(x, "sum", axis[0]))
    return _sent(x, dist.all_reduce(x, group=group_for(axis[0]), async_op=True))


def start_all_gather(x: Tensor, axis: Axis, layout: Layout) -> Started:
    """Start `all_gather`."""
    _, segments = layout
    size = axis[1]
    if is_contiguous(segments, size):
        return start_all_gather_chunks(x.contiguous(), axis).then(
            partial(_unstack, shape=x.shape, size=size, layout=layout)
        )
    shapes = _part_shapes(x.shape, layout, size)
    longest = max(map(prod, shapes))

    def finish(stacked: Tensor) -> Tensor:
        rows = stacked.view(size, longest).unbind()
        return join([_cut(row, shape) for row, shape in zip(rows, shapes, strict=True)], *layout)

    return start_all_gather_chunks(_pad(x, longest), axis).then(finish)


def start_reduce_scatter(x: Tensor, axis: Axis, layout: Layout) -> Started:
    """Start `reduce_scatter`."""
    _, size, rank = axis
    dim, segments = layout
    shapes = _part_shapes(x.shape, layout, size)
    if any(shape != shapes[0] for shape in shapes):
        longest = max(map(prod, shapes))
        stacked = torch.cat([_pad(part, longest) for part in _parts(x, layout, size)])
    elif is_contiguous(segments, size) and 0 not in x.shape:
        return _start_reduce_scatter_even(x, axis, dim)
    elif _is_stacked(x.shape, layout):
        stacked = x.reshape(-1)
    else:
        stacked = torch.cat(_parts(x, layout, size)).reshape(-1)  # cat keeps the parts' strides
    return start_reduce_scatter_chunks(stacked, axis).then(partial(_cut, shape=shapes[rank]))


def _start_reduce_scatter_even(x: Tensor, axis: Axis, dim: int) -> Started:
    """Of equal contiguous chunks along the dim, in a form that Inductor's matcher knows."""
    length = x.shape[dim] // axis[1]
    if all(n == 1 for n in x.shape[:dim]):
        shape = _with_length(x.shape, dim, length)
        started = start_reduce_scatter_chunks(x.flatten(0, dim).contiguous(), axis)
        return started.then(lambda part: part.view(shape)) if dim else started
    return start_reduce_scatter_chunks(torch.cat(x.split(length, dim)).contiguous(), axis)


def start_all_to_all(x: Tensor, axis: Axis, source: Layout, target: Layout) -> Started:
    """Start `all_to_all`."""
    _, size, rank = axis
    sent = _part_shapes(x.shape, target, size)
    received = _part_shapes(sent[rank], source, size)
    if _is_stacked(x.shape, target):
        flat = x.reshape(-1)
    else:
        flat = torch.cat([part.reshape(-1) for part in _parts(x, target, size)])
    counts = list(map(prod, received))
    dim, segments = source

    def finish(flat: Tensor) -> Tensor:
        if x.is_complex() and not flat.is_complex():
            flat = torch.view_as_complex(flat)
        if _is_stacked(sent[rank], source):
            return flat.view(_with_length(sent[rank], dim, local_length(segments, 1, 0)))
        pieces = zip(flat.split(counts), received, strict=True)
        return join([piece.view(shape) for piece, shape in pieces], dim, segments)

    return _start_all_to_all_pieces(flat, axis, list(map(prod, sent)), counts).then(finish)


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


def start_all_gather_chunks(x: Tensor, axis: Axis) -> Started:
    """[n, ...] on every rank -> [size * n, ...]."""
    name, size, rank = axis
    if group := local_group_for(axis):
        chunks = [chunk for (chunk,) in group.exchange(rank, "all_gather", x)]
        return Started(torch.cat(chunks), complete=True)
    if _functional(x):
        return Started(ops.all_gather_into_tensor(x, size, name))
    out = x.new_empty((size * x.shape[0], *x.shape[1:]))
    work = dist.all_gather_single(out, x, group_for(name), async_op=True)
    return _sent(out, work)


def start_reduce_scatter_chunks(x: Tensor, axis: Axis) -> Started:
    """[size * n, ...] on every rank -> this rank's [n, ...] of the sum."""
    name, size, rank = axis
    if group := local_group_for(axis):
        received = group.exchange(rank, "reduce_scatter", *x.chunk(size))
        return Started(reduce(torch.add, [chunks[rank] for chunks in received]), complete=True)
    if _functional(x):
        return Started(ops.reduce_scatter_tensor(x, "sum", size, name))
    out = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    work = dist.reduce_scatter_single(out, x, group=group_for(name), async_op=True)
    return _sent(out, work)


def _start_all_to_all_pieces(
    x: Tensor, axis: Axis, sent: list[int], received: list[int]
) -> Started:
    """A piece [n, ...] for every rank, concatenated -> the pieces from every rank."""
    name, _, rank = axis
    if group := local_group_for(axis):
        pieces = group.exchange(rank, "all_to_all", *x.split(sent))
        return Started(torch.cat([from_rank[rank] for from_rank in pieces]), complete=True)
    if x.is_complex():  # gloo has no complex all-to-all
        x = torch.view_as_real(x.resolve_conj())
    return Started(ops.all_to_all_single(x, received, sent, name))


def _unstack(stacked: Tensor, shape: Sequence[int], size: int, layout: Layout) -> Tensor:
    """Parts of this shape, one after the other, as the global tensor."""
    dim, _ = layout
    if _is_stacked(shape, layout):
        return stacked.view(_with_length(shape, dim, size * shape[dim]))
    if 0 in shape:
        return stacked.new_empty(_with_length(shape, dim, size * shape[dim]))
    return torch.cat(stacked.split(shape[0]), dim)  # as Inductor's matcher knows it


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
