"""All ranks of a mesh axis as threads of one process, for `verify` and for tests.

No process group is needed: a collective on the axis of a `LocalGroup` exchanges tensors in
memory.  The ranks run in lockstep, one at a time: a rank runs until its next collective, then
passes the turn on.  So they cannot race, and each one sees its own copy of the random stream,
as a process of its own would.  CPU only: the backward pass of a CUDA tensor runs in one thread
per device, which all ranks would share.
"""

import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from tpcompile.errors import RankMismatchError

Axis = tuple[str, int, int]
"""(process group name, size, rank)."""
T = TypeVar("T")

_PREFIX = "local:"
_GROUPS: "weakref.WeakValueDictionary[str, LocalGroup]" = weakref.WeakValueDictionary()
_COUNT = itertools.count()


class _Stopped(BaseException):
    """Ends a rank because another one failed; not an Exception, so that no rank catches it."""


@dataclass
class _Post:
    """What one rank brings to a collective."""

    kind: str
    values: list[Tensor]


class LocalGroup:
    """`size` ranks that run as threads of this process.

    >>> LocalGroup(2).run(lambda axis: axis[2])
    [0, 1]
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.name = f"{_PREFIX}{next(_COUNT)}"
        self._changed = threading.Condition()
        self._turn: int | None = None
        self._live: list[int] = []
        self._board: list[_Post | None] | None = None
        self._failure: BaseException | None = None
        _GROUPS[self.name] = self

    def axis(self, rank: int) -> Axis:
        """The axis as rank `rank` passes it to the functions of `collectives`."""
        return (self.name, self.size, rank)

    def run(self, fn: Callable[[Axis], T]) -> list[T]:
        """Results of `fn(axis)` on every rank, in rank order.

        Every rank starts from the caller's random state, grad mode and autocast; afterwards the
        random state is that of rank 0.  The first error of a rank is raised; the others stop.
        """
        assert self._turn is None, "a LocalGroup runs one function at a time"
        self._turn, self._live, self._failure = 0, list(range(self.size)), None
        results: list[Any] = [None] * self.size
        states = [torch.get_rng_state()] * self.size
        grad = torch.is_grad_enabled()
        autocast, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

        def main(rank: int) -> None:
            try:
                self._wait_turn(rank, states[rank])
                with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype, autocast):
                    results[rank] = fn(self.axis(rank))
                states[rank] = torch.get_rng_state()
                self._leave(rank)
            except _Stopped:
                pass
            except BaseException as error:  # the caller raises it
                self._fail(error)

        threads = [
            threading.Thread(target=main, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._turn = self._board = None
        torch.set_rng_state(states[0])
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return results

    def exchange(self, rank: int, kind: str, *values: Tensor) -> list[list[Tensor]]:
        """The values of all ranks, in rank order; every rank must run the same collective."""
        assert self._turn == rank, "collectives of a LocalGroup work only inside run()"
        if rank == 0:
            # A new one each time: the later ranks have yet to read the last one.
            self._board = [None for _ in range(self.size)]
        board = self._board
        if board is None:
            raise _mismatch(rank, kind, 0, None)
        # Copied because the rank may overwrite its tensors before the others have their turn.
        board[rank] = _Post(kind, [value.detach().clone() for value in values])
        state = torch.get_rng_state()
        with self._changed:
            self._pass_turn(rank)
        self._wait_turn(rank, state)
        received = []
        for other, post in enumerate(board):
            if post is None or post.kind != kind:
                raise _mismatch(rank, kind, other, post)
            received.append(post.values)
        return received

    def _wait_turn(self, rank: int, state: Tensor) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._turn == rank)
            if self._failure is not None:
                raise _Stopped
        torch.set_rng_state(state)

    def _pass_turn(self, rank: int) -> None:
        """Give the turn to the next rank that still runs; the lock is held."""
        later = [r for r in self._live if r > rank]
        self._turn = (later or self._live or [rank])[0]
        self._changed.notify_all()

    def _leave(self, rank: int) -> None:
        with self._changed:
            self._live.remove(rank)
            if rank == 0:
                self._board = None
            self._pass_turn(rank)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()


def run_ranks(size: int, fn: Callable[[Axis], T]) -> list[T]:
    """Results of `fn(axis)` on `size` ranks of a new `LocalGroup`, in rank order."""
    return LocalGroup(size).run(fn)


def local_group_for(axis: Axis) -> LocalGroup | None:
    """The LocalGroup an axis belongs to; None for the axis of a process group."""
    return _GROUPS[axis[0]] if axis[0].startswith(_PREFIX) else None


def _mismatch(rank: int, kind: str, other: int, post: _Post | None) -> RankMismatchError:
    found = f"runs {post.kind}" if post else "has finished"
    return RankMismatchError(
        f"rank {rank} runs {kind}, a collective of all ranks.",
        f"rank {other} {found}.",
        "run the same program on every rank, with no branch on the rank around a collective.",
    )
