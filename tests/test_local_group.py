"""Ranks as threads: lockstep, random state, and errors that end all ranks."""

import pytest
import torch

from tpcompile.collectives import all_gather, all_reduce, copy
from tpcompile.errors import RankMismatchError
from tpcompile.local_group import Axis, LocalGroup, run_ranks


def test_results_in_rank_order() -> None:
    """One result per rank; a group runs as often as it likes, on one name."""
    group = LocalGroup(3)
    assert group.run(lambda axis: axis) == [(group.name, 3, rank) for rank in range(3)]
    assert group.run(lambda axis: axis[2]) == [0, 1, 2]
    assert group.axis(1) == (group.name, 3, 1)


def test_lockstep() -> None:
    """One rank runs at a time, in order, from collective to collective."""
    trace = []

    def run(axis: Axis) -> None:
        for step in range(3):
            trace.append((step, axis[2]))
            all_reduce(torch.ones(1), axis)

    run_ranks(3, run)
    assert trace == sorted(trace)


def test_tensor_overwritten_after_a_collective() -> None:
    """A rank that reuses its tensor at once does not change what later ranks receive."""

    def run(axis: Axis) -> float:
        x = torch.ones(1)
        y = all_reduce(x, axis)
        x.fill_(100)
        return y.item()

    assert run_ranks(3, run) == [3.0] * 3


def test_random_state() -> None:
    """Every rank draws the caller's stream; afterwards the state is that of rank 0."""
    torch.manual_seed(5)
    want = torch.rand(3).tolist()

    def run(axis: Axis) -> list[float]:
        draws = []
        for _ in range(2):
            draws.append(torch.rand(1).item())
            all_reduce(torch.ones(1), axis)
        return draws + ([torch.rand(1).item()] if axis[2] else [])

    torch.manual_seed(5)
    first, second = run_ranks(2, run)
    assert first == want[:2]
    assert second == want
    assert torch.rand(1).item() == want[2]


def test_thread_settings() -> None:
    """Ranks run in the caller's grad mode and autocast."""

    def run(axis: Axis) -> tuple[bool, torch.dtype]:
        x = torch.ones(2, 2)
        return torch.is_grad_enabled(), (x @ x).dtype

    assert run_ranks(2, run) == [(True, torch.float32)] * 2
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert run_ranks(2, run) == [(False, torch.bfloat16)] * 2


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_error_of_one_rank(failing: int) -> None:
    """The error is raised in the caller, and no rank hangs, in the backward pass either."""

    def run(axis: Axis) -> None:
        x = torch.ones(1).requires_grad_()
        y = copy(x, axis)
        if axis[2] == failing:
            raise ValueError(f"rank {failing}")
        y.backward()

    group = LocalGroup(3)
    with pytest.raises(ValueError, match=f"rank {failing}"):
        group.run(run)
    assert group.run(lambda axis: axis[2]) == [0, 1, 2]


def test_different_collectives() -> None:
    """Ranks that run different collectives get an error that says which."""

    def run(axis: Axis) -> None:
        x = torch.ones(2)
        if axis[2] == 0:
            all_reduce(x, axis)
        else:
            all_gather(x, axis, 0, ((1, 4, 1),))

    with pytest.raises(RankMismatchError) as error:
        run_ranks(2, run)
    assert str(error.value) == (
        "rank 0 runs all_reduce(sum), a collective of all ranks.\n"
        "  rank 1 runs all_gather.\n"
        "  fix: run the same program on every rank, with no branch on the rank around a collective."
    )


@pytest.mark.parametrize("early", [0, 1])
def test_finished_rank(early: int) -> None:
    """A collective that one rank does not reach is an error, not a hang."""

    def run(axis: Axis) -> None:
        all_reduce(torch.ones(1), axis)
        if axis[2] != early:
            all_reduce(torch.ones(1), axis)

    with pytest.raises(RankMismatchError, match=f"rank {early} has finished"):
        run_ranks(2, run)
