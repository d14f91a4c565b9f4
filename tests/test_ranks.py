"""The pool of real ranks itself."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailure


def gather_ranks(offset: int) -> torch.Tensor:
    """Sum of all ranks plus the offset, and the process id."""
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    return total


def process_id() -> int:
    """This rank's process."""
    return os.getpid()


def fail_on_one() -> None:
    """Rank 1 raises; rank 0 waits for it in a collective."""
    if dist.get_rank() == 1:
        raise ValueError("rank one is unhappy")
    dist.all_reduce(torch.zeros(1))


def fail_on_all() -> None:
    """Every rank raises the same."""
    raise ValueError("all are unhappy")


def die_on_one() -> None:
    """Rank 0 ends without a word."""
    if dist.get_rank() == 0:
        os._exit(3)


def hang() -> None:
    """Longer than the test's timeout."""
    time.sleep(30)


def test_values_come_back_in_rank_order(ranks):
    """Collectives work, values are per rank, and the pool is reused."""
    assert [int(t) for t in ranks(gather_ranks, 2, 10)] == [21, 21]
    first = ranks(process_id, 2)
    assert first == ranks("test_ranks:process_id", 2)
    assert len(set(first)) == 2


def test_failures_carry_the_traceback_and_leave_a_working_pool(ranks):
    """One rank raising, all raising, and one dying each fail the call, not the next one."""
    with pytest.raises(RankFailure, match=r"rank 1 of 2:[^$]*rank one is unhappy"):
        ranks(fail_on_one, 2)
    before = ranks(process_id, 2)
    with pytest.raises(RankFailure, match="all are unhappy"):
        ranks(fail_on_all, 2)
    assert ranks(process_id, 2) == before, "ranks that failed alike are still in step"
    with pytest.raises(RankFailure, match="died with exit code 3"):
        ranks(die_on_one, 2)
    assert [int(t) for t in ranks(gather_ranks, 2, 0)] == [1, 1]


def test_hang_is_killed(ranks):
    """A call that takes too long fails and leaves a working pool."""
    ranks(process_id, 2)
    with pytest.raises(RankFailure, match=r"ranks \[0, 1\] gave nothing in 0.5 s"):
        ranks(hang, 2, timeout=0.5)
    assert [int(t) for t in ranks(gather_ranks, 2, 0)] == [1, 1]
