"""Shared fixtures: real ranks, golden texts."""

import os

# Before torch is imported: tests run on few cores, next to the ranks of the pools.
os.environ["OMP_NUM_THREADS"] = "1"

from collections.abc import Callable
from pathlib import Path

import pytest
import ranks as rank_pools
import torch

torch.set_num_threads(1)

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--accept`."""
    parser.addoption("--accept", action="store_true", help="rewrite the texts in tests/golden")


def pytest_sessionfinish() -> None:
    """End the pools of ranks."""
    rank_pools.close_pools()


@pytest.fixture
def ranks() -> Callable:
    """`ranks(fn, size, *args)` -> the value of `fn(*args)` on each of `size` gloo ranks."""
    return rank_pools.run_on_ranks


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` asserts that text is tests/golden/<name>.txt; `--accept` rewrites it."""

    def check(name: str, text: str) -> None:
        path, text = GOLDEN / f"{name}.txt", text.rstrip("\n") + "\n"
        if request.config.getoption("--accept"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path.name} does not exist; run pytest --accept and review it"
        assert text == path.read_text()

    return check
