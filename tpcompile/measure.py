"""Measurements of the present machine, and the least-squares fit of a link to them."""

import math
import time
from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tpcompile import wire
from tpcompile.hardware import Curve, Link
from tpcompile.local_group import Axis

KINDS = ("all_reduce", "all_gather", "reduce_scatter")
Sample = tuple[str, int, int, float]
"""(kind of collective, ranks, bytes of the whole value, seconds)."""


def seconds_of(
    run: Callable[[], object], device: torch.device, repeats: int = 9, *, waits: bool = False
) -> float:
    """Least seconds of a call; where there is a process group, all ranks run it together.

    The least, as everything else that a machine does can only make a call longer. For the same
    reason arithmetic on one CPU thread is timed by that thread's own clock; `waits` says that the
    call waits for others, whose time counts.
    """
    own = device.type == "cpu" and torch.get_num_threads() == 1 and not waits
    clock = time.thread_time if own else time.perf_counter
    found = []
    for attempt in range(repeats + 2):
        _wait(device)
        begin = clock()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if attempt >= 2:
            found.append(clock() - begin)
    return min(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def matmul_rate(
    dtype: torch.dtype, side: int, large: int, device: torch.device, repeats: int = 9
) -> float:
    """FLOP/s of [large, large] x [large, side]."""
    a = torch.ones(large, large, dtype=dtype, device=device)
    b = torch.ones(large, side, dtype=dtype, device=device)
    return 2.0 * large * large * side / seconds_of(lambda: a @ b, device, repeats)


def efficiency(sides: Sequence[int], large: int, device: torch.device) -> tuple[float, Curve]:
    """(float32 FLOP/s at the largest side, the others as a fraction of it)."""
    rates = [matmul_rate(torch.float32, side, large, device) for side in sides]
    best = max(rates)
    return best, tuple((side, rate / best) for side, rate in zip(sides, rates, strict=True))


def memory_bandwidth(nbytes: int, device: torch.device) -> float:
    """Bytes/s of an op that reads `nbytes` and writes as many into new memory."""
    x = torch.ones(nbytes // 4, device=device)
    return 2.0 * nbytes / seconds_of(lambda: x + 1, device)


def launch(device: torch.device, ops: int = 100) -> float:
    """Seconds of a small op: a third of what forward and backward of one take together."""
    x = torch.ones(64, device=device, requires_grad=True)

    def run() -> None:
        y = x
        for _ in range(ops):
            y = y * 1.0001
        y.sum().backward()

    # Autograd runs in a thread of its own on a GPU, and in the caller's on a CPU.
    return seconds_of(run, device) / ops / 3


def collective_seconds(kind: str, nbytes: int, axis: Axis, device: torch.device) -> float:
    """Seconds of one collective over a float32 value of `nbytes` (whole)."""
    _, size, _ = axis
    count = max(nbytes // 4 // size, 1) * size
    layout = (0, ((1, count, 1),))
    whole = torch.ones(count, device=device)
    part = torch.ones(count // size, device=device)
    calls: dict[str, Callable[[], Tensor]] = {
        "all_reduce": lambda: wire.all_reduce(whole, axis),
        "all_gather": lambda: wire.all_gather(part, axis, layout),
        "reduce_scatter": lambda: wire.reduce_scatter(whole, axis, layout),
    }
    return seconds_of(calls[kind], device, waits=True)


def fit_link(samples: Sequence[Sample]) -> Link:
    """The link whose ring formula is nearest to the measured times, in relative error.

    Seconds = startup + hops * latency + bytes sent / bandwidth, none of them negative: the best
    of the least-squares fits over all choices of terms. `CostModel.collective` is that formula.
    """
    rows, times = [], []
    for kind, size, nbytes, seconds in samples:
        rounds = 2 if kind == "all_reduce" else 1
        hops = rounds * (size - 1)
        rows.append((1.0, hops, hops * nbytes / size))
        times.append(seconds)
    weight = 1 / np.array(times)
    matrix, target = np.array(rows) * weight[:, None], np.ones(len(times))
    best, least = np.zeros(3), math.inf
    for terms in ((*some, 2) for n in range(3) for some in combinations((0, 1), n)):
        found, *_ = np.linalg.lstsq(matrix[:, terms], target, rcond=None)
        error = float(np.square(matrix[:, terms] @ found - target).sum())
        if (found >= 0).all() and found[-1] > 0 and error < least - 1e-12:
            best, least = np.zeros(3), error
            best[list(terms)] = found
    assert math.isfinite(least), f"no link fits {samples}"
    return Link(bandwidth=1 / best[2], latency=best[1], startup=best[0])
