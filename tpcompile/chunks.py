"""Matmuls whose collective runs chunk by chunk: one is sent while the next one is multiplied.

A dim that is split over `size` ranks is cut into `n` chunks of every rank's part, so that chunk i
of all ranks together is what one collective moves: a whole value is seen as [p, size, n, q, k], a
part as [p, n, q, k], with p the dims before the split one and q its chunk and the dims after it.
Without a split dim, chunks are runs of rows.
"""

from collections.abc import Callable, Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from tpcompile import wire
from tpcompile.layout import is_contiguous
from tpcompile.local_group import Axis
from tpcompile.wire import Layout, Started


def multiply_and_reduce(
    x: Tensor, weight: Tensor, axis: Axis, layout: Layout | None, chunks: int
) -> Tensor:
    """`x @ weight.t()` summed over the ranks; this rank's part of it where there is a layout."""

    def product(rows: Tensor, out: Tensor) -> None:
        torch.mm(rows, weight.t(), out=out)

    n = weight.shape[0]
    if layout is None:
        rows = x.flatten(0, -2)
        out = x.new_empty(*x.shape[:-1], n)
        flat = out.view(len(rows), n)
        for each in _reduce_rows(flat, axis, chunks, lambda a, b, o: product(rows[a:b], o)):
            each.wait()
        return out
    if not can_cut(x.shape, layout, axis[1], chunks):
        return wire.reduce_scatter(F.linear(x, weight), axis, layout)
    grid = _whole(x, layout, axis[1], chunks)

    def chunk(i: int, out: Tensor) -> None:
        product(_stacked(grid, i), out)

    return _scatter(x, [*x.shape[:-1], n], axis, layout, chunks, chunk).wait()


def gather_and_multiply(
    x: Tensor,
    axis: Axis,
    layout: Layout,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    chunks: int,
) -> tuple[Tensor, list[Tensor]]:
    """The whole of `x` from every rank's part, and its linears."""
    size, dim = axis[1], layout[0]
    shape = [*x.shape[:dim], x.shape[dim] * size, *x.shape[dim + 1 :]]
    if not can_cut(shape, layout, size, chunks):
        whole = wire.all_gather(x, axis, layout)
        return whole, [F.linear(whole, w, b) for w, b in zip(weights, biases, strict=True)]
    parts = x.reshape(prod(x.shape[:dim]), chunks, -1, x.shape[-1])
    started = [wire.start_all_gather_chunks(parts[:, i].contiguous(), axis) for i in range(chunks)]
    whole = x.new_empty(shape)
    outs = [x.new_empty(*shape[:-1], w.shape[0]) for w in weights]
    for i, each in enumerate(started):
        piece = each.wait().view(size, parts.shape[0], *parts.shape[2:])
        _whole(whole, layout, size, chunks)[:, :, i] = piece.transpose(0, 1)
        for out, weight, bias in zip(outs, weights, biases, strict=True):
            product = F.linear(piece, weight, bias)
            _whole(out, layout, size, chunks)[:, :, i] = product.transpose(0, 1)
    return whole, outs


def start_input_gradient(
    passed: Tensor | None,
    grads: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    axis: Axis,
    layout: Layout | None,
    shape: Sequence[int],
    chunks: int,
) -> "Started | _Pieces":
    """Start summing the gradient of linears' common input over the ranks (scattering, by layout).

    Args:
        passed: Gradient of the input's other readers, [*b, k].
        grads: Of the linears' outputs, [*b, n] each; None where there is none.
        weights: [n, k] each.
        axis: The ranks.
        layout: How the input is split; None: it is not.
        shape: Of the whole input.
        chunks: How many collectives.
    """
    pairs = [(g, w) for g, w in zip(grads, weights, strict=True) if g is not None]
    like = passed if passed is not None else pairs[0][0]
    if layout is not None and chunks > 1 and can_cut(shape, layout, axis[1], chunks):
        grids = [(_whole(g, layout, axis[1], chunks), w) for g, w in pairs]
        other = None if passed is None else _whole(passed, layout, axis[1], chunks)

        def fill_chunk(i: int, out: Tensor) -> None:
            start = None if other is None else _stacked(other, i)
            _add_products(start, [(_stacked(g, i), w) for g, w in grids], out)

        return _scatter(like, shape, axis, layout, chunks, fill_chunk)
    out = like.new_empty(shape)
    flat = out.view(prod(shape[:-1]), shape[-1])
    rows = [(g.flatten(0, -2), w) for g, w in pairs]
    start = None if passed is None else passed.flatten(0, -2)
    if layout is not None:
        _add_products(start, rows, flat)
        return wire.start_reduce_scatter(out, axis, layout)

    def fill(a: int, b: int, chunk: Tensor) -> None:
        part = None if start is None else start[a:b]
        _add_products(part, [(g[a:b], w) for g, w in rows], chunk)

    return _Pieces(_reduce_rows(flat, axis, chunks, fill), lambda _: out)


def can_cut(shape: Sequence[int], layout: Layout, size: int, chunks: int) -> bool:
    """Whether the split dim of a whole value of this shape can be cut into equal chunks.

    Does not depend on the last dim, which may differ between ranks.
    """
    dim, segments = layout
    inside = dim < len(shape) - 1 and is_contiguous(segments, size)
    return inside and shape[dim] % (size * chunks) == 0 and prod(shape[:-1]) > 0


class _Pieces:
    """Collectives on their way that together give one tensor."""

    def __init__(
        self, started: Sequence[Started], finish: Callable[[list[Tensor]], Tensor]
    ) -> None:
        self._started, self._finish = started, finish

    def wait(self) -> Tensor:
        """The tensor, complete."""
        return self._finish([each.wait() for each in self._started])


def _reduce_rows(
    flat: Tensor, axis: Axis, chunks: int, fill: Callable[[int, int, Tensor], None]
) -> list[Started]:
    """Fill runs of rows `a .. b` and start the sum of each in place."""
    started = []
    length = max(1, -(-len(flat) // chunks))
    for begin in range(0, len(flat), length):
        end = min(len(flat), begin + length)
        fill(begin, end, flat[begin:end])
        started.append(wire.start_all_reduce_(flat[begin:end], axis))
    return started


def _scatter(
    like: Tensor,
    shape: Sequence[int],
    axis: Axis,
    layout: Layout,
    chunks: int,
    fill: Callable[[int, Tensor], None],
) -> _Pieces:
    """Fill chunks (parts of all ranks, stacked) of a value of this shape and scatter each."""
    size, dim = axis[1], layout[0]
    rows, k = prod(shape[:-1]) // chunks, shape[-1]
    started = []
    for i in range(chunks):
        stacked = like.new_empty(rows, k)
        fill(i, stacked)
        started.append(wire.start_reduce_scatter_chunks(stacked, axis))
    local = [*shape[:dim], shape[dim] // size, *shape[dim + 1 :]]

    def finish(pieces: list[Tensor]) -> Tensor:
        grid = [piece.view(prod(shape[:dim]), 1, -1, k) for piece in pieces]
        return torch.cat(grid, 1).view(local)

    return _Pieces(started, finish)


def _whole(x: Tensor, layout: Layout, size: int, chunks: int) -> Tensor:
    """[*b, s, *q, k] -> [p, size, n, q, k]."""
    dim = layout[0]
    inner = x.shape[dim] // (size * chunks) * prod(x.shape[dim + 1 : -1])
    return x.reshape(prod(x.shape[:dim]), size, chunks, inner, x.shape[-1])


def _stacked(grid: Tensor, i: int) -> Tensor:
    """Chunk i of [p, size, n, q, k], as rows in the order of the ranks."""
    return grid[:, :, i].transpose(0, 1).flatten(0, 2)


def _add_products(
    start: Tensor | None, pairs: Sequence[tuple[Tensor, Tensor]], out: Tensor
) -> None:
    """Write `start` plus the products of the pairs into `out`, all of them [b, k]."""
    if start is not None:
        out.copy_(start)
    for i, (grad, weight) in enumerate(pairs):
        if i == 0 and start is None:
            torch.mm(grad, weight, out=out)
        else:
            out.addmm_(grad, weight)
