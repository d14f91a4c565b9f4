"""A link that is slow on purpose, in real time or in counted time."""

import time
from contextlib import contextmanager

import torch

from tpcompile import wire
from tpcompile.torch_private import TorchDispatchMode, pytree

aten = torch.ops.aten
MATMULS = (aten.mm.default, aten.mm.out, aten.addmm.default, aten.addmm_.default, aten.bmm.default)


class Real:
    """Wall time."""

    now = staticmethod(time.perf_counter)

    def until(self, then):
        """Sleep."""
        time.sleep(max(0.0, then - self.now()))


class Counted(TorchDispatchMode):
    """Time that passes by multiplying only: as many seconds as multiply-adds."""

    def __init__(self):
        super().__init__()
        self.time = 0.0

    def now(self):
        """Seconds since the start."""
        return self.time

    def until(self, then):
        """Let the time pass."""
        self.time = max(self.time, then)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count, then run."""
        if func in MATMULS:
            a, b = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)][-2:]
            self.time += a.numel() * b.shape[-1]
        return func(*args, **(kwargs or {}))


class Log:
    """What the link did."""

    def __init__(self):
        self.count, self.sent, self.waited = 0, 0.0, 0.0


@contextmanager
def slow_link(clock, seconds, blocking=False):
    """Collectives take `seconds(elements of the result)` each, one after the other.

    With `blocking`, each is waited for where it starts.  Yields a `Log`.
    """
    log, free, plain = Log(), [clock.now()], wire.Started

    class Slow(plain):
        def __init__(self, result, complete=False):
            super().__init__(result, complete)
            self.done = 0.0
            if complete:  # nothing was sent
                return
            took = seconds(result.numel())
            self.done = free[0] = max(free[0], clock.now()) + took
            log.count, log.sent = log.count + 1, log.sent + took
            if blocking:
                self.arrive()

        def arrive(self):
            log.waited += max(0.0, self.done - clock.now())
            clock.until(self.done)

        def wait(self):
            self.arrive()
            return super().wait()

    wire.Started = Slow
    try:
        yield log
    finally:
        wire.Started = plain
