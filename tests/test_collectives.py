"""Every conversion, forward and backward, against the definition of its placement states."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_vocab import check_vocab, tied_gradients, tied_loss
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tpcompile import collectives, wire
from tpcompile.collectives import COLLECTIVES, Collective
from tpcompile.layout import Segments, local_length, take
from tpcompile.local_group import Axis, run_ranks
from tpcompile.wire import Layout

SEGMENTS = [
    ((1, 12, 1),),
    ((1, 7, 1),),
    ((1, 2, 1),),
    ((1, 4, 3),),
    ((2, 6, 1),),
    ((3, 5, 2),),
    ((1, 8, 2), (1, 2, 2), (1, 2, 2)),
    ((2, 3, 1), (1, 1, 4)),
]
SHAPES = {0: [(-1, 3), (-1,)], 1: [(3, -1, 2), (1, -1, 2)], 2: [(2, 3, -1), (1, 1, -1)]}
"""By dim; -1 is the split dim."""


def layouts() -> list[tuple[tuple[int, ...], Layout]]:
    """(global shape, layout) of every case."""
    cases = []
    for segments, (dim, shapes) in itertools.product(SEGMENTS, SHAPES.items()):
        length = local_length(segments, 1, 0)
        for shape in shapes:
            cases.append((tuple(length if n < 0 else n for n in shape), (dim, segments)))
    return cases


def held(x: Tensor, summands: Tensor, state: str, axis: Axis, layout: Layout | None) -> Tensor:
    """What a rank holds of `x`, the sum of the summands, in a state."""
    _, size, rank = axis
    if state == "S":
        return take(x, *layout, size, rank)
    return summands[rank] if state == "P" else x


def gradient_state(state: str) -> str:
    """State of the gradient of a value in `state`."""
    return {"R": "R", "R*": "P", "S": "S", "P": "R"}[state]


def call(row: Collective, x: Tensor, axis: Axis, source: Layout, target: Layout) -> Tensor:
    """The conversion of one row of the table."""
    convert = getattr(collectives, row.name)
    if row.name == "all_to_all":
        return convert(x, axis, *source, *target)
    if row.name in ("all_gather", "split"):
        return convert(x, axis, *source, "R*" in (row.source, row.target))
    return convert(x, axis, *source) if "S" in (row.source, row.target) else convert(x, axis)


def strided(x: Tensor) -> Tensor:
    """The same values, not contiguous where that is possible."""
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


def check_row(
    row: Collective, axis: Axis, shape: tuple[int, ...], source: Layout, target: Layout
) -> None:
    """One conversion gives what its states say, of the value and of the gradient."""
    _, size, _ = axis
    parts, grads = torch.randn(2, size, *shape, dtype=torch.float64)
    x = strided(held(parts.sum(0), parts, row.source, axis, source)).requires_grad_()
    kept = x.detach().clone()
    y = call(row, x, axis, source, target)
    torch.testing.assert_close(y, held(parts.sum(0), parts, row.target, axis, target))
    upstream = held(grads.sum(0), grads, gradient_state(row.target), axis, target)
    (got,) = torch.autograd.grad(y, x, strided(upstream))
    if row.source == "R*" and size > 1:
        got = wire.all_reduce(got, axis)
    torch.testing.assert_close(
        got, held(grads.sum(0), grads, "R" if row.source != "S" else "S", axis, source)
    )
    assert torch.equal(x, kept)
    if size > 1:
        assert y.is_contiguous() or row.forward == "none"
        assert got.is_contiguous() or row.backward == "none"


def check_conversions(axis: Axis) -> None:
    """All rows of the table on all layouts."""
    torch.manual_seed(0)
    for row, (shape, layout) in itertools.product(COLLECTIVES, layouts()):
        if row.name not in ("all_to_all", "to_partial", "pad"):
            check_row(row, axis, shape, layout, layout)
    check_to_partial(axis)
    check_pad(axis)
    for first, second in itertools.product(SEGMENTS, SEGMENTS):
        lengths = [local_length(s, 1, 0) for s in (first, second)]
        row = next(row for row in COLLECTIVES if row.name == "all_to_all")
        check_row(row, axis, (*lengths, 2), (0, first), (1, second))
        check_row(row, axis, (3, lengths[1], lengths[0]), (2, first), (1, second))
        check_row(row, axis, (1, *lengths), (1, first), (2, second))


def check_to_partial(axis: Axis) -> None:
    """A value counted once: the ranks' parts add up to it, and so do partial gradients."""
    grads = torch.randn(axis[1], 3, dtype=torch.float64)
    for partial_grad in (False, True):
        x = torch.arange(3.0, dtype=torch.float64).requires_grad_()
        y = collectives.to_partial(x, axis, partial_grad)
        torch.testing.assert_close(wire.all_reduce(y.detach(), axis), x.detach())
        (got,) = torch.autograd.grad(y, x, grads[0])
        total = wire.all_reduce(got, axis) if partial_grad and axis[1] > 1 else got
        torch.testing.assert_close(total, grads[0])


def check_pad(axis: Axis) -> None:
    """The padded parts add up to the whole value; the gradient is this rank's part of it."""
    for shape, (dim, segments) in layouts():
        whole, grad = torch.randn(2, *shape, dtype=torch.float64)
        x = take(whole, dim, segments, *axis[1:]).requires_grad_()
        y = collectives.pad(x, axis, dim, segments)
        torch.testing.assert_close(wire.all_reduce(y.detach(), axis), whole)
        (got,) = torch.autograd.grad(y, x, grad)
        torch.testing.assert_close(got, take(grad, dim, segments, *axis[1:]))


def check_dtypes(axis: Axis) -> None:
    """Gathers and exchanges move every dtype."""
    _, size, rank = axis
    plain, uneven = ((1, 2 * size, 1),), ((1, 2 * size - 1, 1),)
    for dtype, segments in itertools.product(
        (torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64), (plain, uneven)
    ):
        x = (torch.arange(4 * size * size).view(2 * size, -1)[: segments[0][1]] % 3).to(dtype)
        part = take(x, 0, segments, size, rank)
        assert torch.equal(collectives.all_gather(part, axis, 0, segments), x)
        swapped = collectives.all_to_all(part, axis, 0, segments, 1, plain)
        assert torch.equal(swapped, take(x, 1, plain, size, rank))


def check_copy_many(axis: Axis) -> None:
    """Gradients are summed per dtype; a missing one stays missing."""
    _, size, rank = axis
    xs = [
        torch.ones(n, dtype=d).requires_grad_()
        for n, d in ((2, torch.float64), (3, torch.float32), (4, torch.float32), (1, torch.float32))
    ]
    a, b, c, _ = collectives.copy_many(axis, *xs)
    ((rank + 1) * a).sum().add((2 * b).sum() + (rank * c).sum()).backward()
    total = size * (size - 1) // 2
    assert xs[0].grad.tolist() == [float(total + size)] * 2
    assert xs[1].grad.tolist() == [2.0 * size] * 3
    assert xs[2].grad.tolist() == [float(total)] * 4
    assert xs[3].grad is None


def block(x: Tensor, w: Tensor, axis: Axis, segments: Segments) -> Tensor:
    """A column and a row parallel matmul with sequence parallelism, then attention-like swaps."""
    part = collectives.split(x, axis, 0, segments)
    full = collectives.all_gather(part, axis, 0, segments)
    w = collectives.split(w, axis, 1, segments)
    hidden = (full @ w).relu()
    out = collectives.reduce_scatter(hidden @ w.t(), axis, 0, segments)
    columns = ((1, x.shape[1], 1),)
    out = collectives.all_to_all(out, axis, 0, segments, 1, columns).sin()
    out = collectives.all_gather(out, axis, 1, columns, False)
    (y,) = collectives.copy_many(axis, out)
    y = collectives.split(y, axis, 1, columns, True).cos()
    return collectives.all_reduce((y * y).sum(1), axis)


def block_gradients(fn: Callable[..., Tensor], axis: Axis, segments: Segments) -> list[Tensor]:
    """Output and gradients of `block` run by `fn`."""
    torch.manual_seed(1)
    length = local_length(segments, 1, 0)
    x = torch.randn(length, 6, dtype=torch.float64).requires_grad_()
    w = torch.randn(6, length, dtype=torch.float64).requires_grad_()
    y = fn(x, w, axis, segments)
    return [y, *torch.autograd.grad(y.square().sum(), (x, w))]


def check_block(axis: Axis) -> None:
    """A composition of conversions equals one device, also inside a checkpoint."""
    for segments in (((1, 8, 1),), ((1, 5, 1),), ((2, 3, 1), (1, 1, 2))):
        want = block_gradients(block, ("", 1, 0), segments)
        torch.testing.assert_close(block_gradients(block, axis, segments), want)
        again = block_gradients(
            lambda *a: checkpoint(block, *a, use_reentrant=False), axis, segments
        )
        torch.testing.assert_close(again, want)


CHECKS = (check_conversions, check_dtypes, check_copy_many, check_block)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("check", CHECKS)
def test_local_ranks(check: Callable[[Axis], None], size: int) -> None:
    """Every check holds on ranks that are threads."""
    run_ranks(size, check)


def test_expanded_input() -> None:
    """A stride-0 input and a stride-0 gradient are summed like any other."""

    def run(axis: Axis) -> None:
        x = torch.ones(1, 4, dtype=torch.float64).requires_grad_()
        y = collectives.all_reduce(x.expand(3, 4), axis)
        z = collectives.copy(y, axis)
        z.sum().backward()
        assert y.tolist() == [[2.0] * 4] * 3
        assert x.grad.tolist() == [[6.0] * 4]

    run_ranks(2, run)


def test_negative_dims() -> None:
    """Dims count from the end as everywhere in torch."""

    def run(axis: Axis) -> None:
        x, plain = torch.arange(24.0).view(2, 3, 4), ((1, 4, 1),)
        part = collectives.split(x, axis, -1, plain)
        assert torch.equal(part, take(x, 2, plain, 2, axis[2]))
        assert torch.equal(collectives.all_gather(part, axis, -1, plain), x)
        swapped = collectives.all_to_all(part, axis, -1, plain, -2, ((1, 3, 1),))
        assert torch.equal(swapped, take(x, 1, ((1, 3, 1),), 2, axis[2]))

    run_ranks(2, run)


def test_table_rows_are_functions() -> None:
    """The table names functions of the module, and each pair of states once."""
    assert all(callable(getattr(collectives, row.name)) for row in COLLECTIVES)
    pairs = [(row.source, row.target) for row in COLLECTIVES]
    assert len(set(pairs)) == len(pairs)


def check_compiled(axis: Axis, backend: str) -> None:
    """One graph, forward and backward, with the results of one device."""
    for segments in (((1, 8, 1),), ((1, 5, 1),)):
        compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=False)
        want = block_gradients(block, ("", 1, 0), segments)
        torch.testing.assert_close(block_gradients(compiled, axis, segments), want)
    compiled = torch.compile(tied_loss, fullgraph=True, backend=backend)
    want = tied_gradients(tied_loss, 9, ("", 1, 0))
    torch.testing.assert_close(tied_gradients(compiled, 9, axis), want)


def run_process(rank: int, store: str) -> None:
    """One rank of the gloo test: all checks eager, then compiled."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    axis = (dist.group.WORLD.group_name, 2, rank)
    for check in (*CHECKS, check_vocab):
        check(axis)
    check_compiled(axis, "aot_eager")
    dist.barrier()
    dist.destroy_process_group()


def test_gloo_processes(tmp_path: Path) -> None:
    """Every check holds on two processes, and under torch.compile with one graph."""
    mp.spawn(run_process, (str(tmp_path / "store"),), nprocs=2)
