"""Real gloo ranks for tests: one long-lived pool of processes per degree, not one spawn a test."""

import faulthandler
import importlib
import multiprocessing as mp
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

TIMEOUT = 120.0
"""Seconds one call may take before its pool is killed."""
GRACE = 3.0
"""Seconds the other ranks get to finish once one rank has failed."""


class RankFailure(Exception):
    """A rank raised, died or hung; the text has its traceback."""


def run_on_ranks(fn: Callable[..., Any] | str, size: int, *args: Any, timeout: float = TIMEOUT):
    """Values of `fn(*args)` on each of `size` gloo ranks, in rank order.

    `fn` is a top-level function of a module under tests/ (or `"module:function"`), called with the
    default process group of `size` ranks up, one torch thread and the seed 0.  Arguments and
    values travel pickled; tensors arrive as plain CPU tensors.

    Raises:
        RankFailure: a rank raised (first traceback in the text), died, or `timeout` seconds passed.
    """
    name = fn if isinstance(fn, str) else f"{fn.__module__}:{fn.__qualname__}"
    if size not in _POOLS:
        _POOLS[size] = _Pool(size)
    try:
        values, in_step = _POOLS[size].call(pickle.dumps((name, args)), timeout)
    except BaseException:  # the ranks are mid-call, also after an interrupt
        _POOLS.pop(size).kill()
        raise
    if not in_step:
        _POOLS.pop(size).kill()
    failed = [value for value in values if isinstance(value, _Raised)]
    if failed:
        first = min(failed, key=lambda raised: raised.at)
        raise RankFailure(f"{name} failed on rank {first.rank} of {size}:\n{first.text}")
    return values


def close_pools() -> None:
    """End all ranks."""
    while _POOLS:
        _POOLS.popitem()[1].kill()


class _Raised:
    """An exception of one rank."""

    def __init__(self, rank: int, error: BaseException) -> None:
        self.rank, self.at = rank, time.time()
        self.text = "".join(traceback.format_exception(error))
        self.what = f"{type(error).__name__}: {error}"


class _Pool:
    """`size` processes that hold one gloo process group."""

    def __init__(self, size: int) -> None:
        self.folder = tempfile.mkdtemp(prefix="ranks")
        context = mp.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(there, rank, size, self.folder, list(sys.path)), daemon=True
            )
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def call(self, message: bytes, timeout: float) -> tuple[list[Any], bool]:
        """The values of all ranks, and whether the ranks are still in step for another call."""
        for pipe in self.pipes:
            pipe.send_bytes(message)
        values: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(values) < len(self.pipes):
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in values]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                values[rank] = self._receive(rank)
                if isinstance(values[rank], _Raised):
                    deadline = min(deadline, time.monotonic() + GRACE)
        failed = [value for value in values.values() if isinstance(value, _Raised)]
        if len(values) < len(self.pipes) and not failed:
            missing = sorted(set(range(len(self.pipes))) - set(values))
            self._print_stacks(missing)
            raise RankFailure(f"ranks {missing} gave nothing in {timeout:g} s (stacks: stderr)")
        alike = len(values) == len(self.pipes) == len(failed) and len({f.what for f in failed}) == 1
        return [values.get(rank) for rank in range(len(self.pipes))], not failed or alike

    def _receive(self, rank: int) -> Any:
        try:
            return pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(GRACE)
            code = self.processes[rank].exitcode
            return _Raised(rank, RuntimeError(f"the process died with exit code {code}"))

    def _print_stacks(self, ranks: list[int]) -> None:
        for rank in ranks:
            if self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid, signal.SIGUSR1)  # type: ignore[arg-type]
        time.sleep(0.5)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


_POOLS: dict[int, _Pool] = {}


def _serve(pipe: Connection, rank: int, size: int, folder: str, path: list[str]) -> None:
    """Body of one rank: calls functions until the pipe closes."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    sys.path[:] = path
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=10 * TIMEOUT),
    )
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            # The interpreter's own teardown of gloo threads may block; nothing is left to save.
            os._exit(0)
        pipe.send_bytes(_answer(message, rank))


def _answer(message: bytes, rank: int) -> bytes:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    try:
        name, args = pickle.loads(message)
        module, _, function = name.partition(":")
        value = getattr(importlib.import_module(module), function)(*args)
        plain = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu().clone(), value)
        return pickle.dumps(plain)
    except Exception as error:
        return pickle.dumps(_Raised(rank, error))
