"""`calibrate`: measure the present machine into a `Hardware` profile."""

import multiprocessing as mp
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tpcompile import measure
from tpcompile.errors import HardwareError
from tpcompile.hardware import Hardware, Link, load

_SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of the collectives that are timed."""
_SIDES = {"cpu": (8, 32, 128, 512), "cuda": (16, 64, 256, 1024, 4096)}
_LARGE = {"cpu": 1024, "cuda": 8192}
_COPIED = {"cpu": 1 << 24, "cuda": 1 << 28}
_PATIENCE = 600.0
"""Seconds that started processes may take."""


def calibrate(
    *,
    ranks: int = 2,
    path: str | os.PathLike[str] | None = None,
    name: str = "",
    node: int | None = None,
) -> Hardware:
    """Measure matmuls, memory, small ops and collectives of this machine.

    Where torch.distributed is initialized every rank has to call it: the default group is
    measured on its backend, all ranks busy at once, and each returns rank 0's profile. Otherwise
    `ranks` gloo processes are started on this machine and measured (1: no collectives).

    Args:
        ranks: Processes to start; ignored where there is a process group.
        path: Where to save the profile, for `hardware=path`.
        name: Of the profile.
        node: Devices of one node; None: the group is one node. A group that crosses nodes gives
            the link between nodes, so calibrate twice and combine with `dataclasses.replace`.

    Raises:
        HardwareError: `ranks` is not positive, or a started process failed.
    """
    if dist.is_initialized():
        profile = measured_profile(name, node)
    elif ranks < 1:
        raise HardwareError(
            f"calibrate(ranks={ranks})", "at least one process is needed", "ranks=2"
        )
    elif ranks == 1:
        profile = measured_profile(name, node)
    else:
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "profile.json"
            on_gloo_ranks(_profile_to, ranks, name, node, str(result))
            profile = load(result)
    if path is not None and (not dist.is_initialized() or dist.get_rank() == 0):
        profile.save(path)
    return profile


def measured_profile(name: str = "", node: int | None = None) -> Hardware:
    """The profile of this process's device, and of the default group's links where there is one."""
    alone = not dist.is_initialized()
    backend = "" if alone else dist.get_backend()
    device = torch.device("cuda" if backend == "nccl" or _has_gpu(alone) else "cpu")
    size = 1 if alone else dist.get_world_size()
    large, sides = _LARGE[device.type], _SIDES[device.type]
    single, curve = measure.efficiency(sides, large, device)
    flops = {torch.float32: single}
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        # Small on a CPU, where some dtypes run a hundred times slower than float32.
        side, other = (sides[-1], large) if device.type == "cuda" else (128, 256)
        flops[dtype] = measure.matmul_rate(dtype, side, other, device, repeats=3)
    profile = Hardware(
        name or f"{device.type}-{backend or 'alone'}-{size}",
        flops,
        memory_bandwidth=measure.memory_bandwidth(_COPIED[device.type], device),
        memory=_memory(device, size),
        inside=Link(1e9, 0.0) if size == 1 else measure.fit_link(link_samples(device)),
        node=node or size,
        launch=measure.launch(device),
        efficiency=curve,
        source=f"measured on {size} {'rank' if size == 1 else 'ranks, all busy at once'}",
    )
    return profile if size == 1 else _of_rank_0(profile)


def link_samples(device: torch.device) -> list[measure.Sample]:
    """Timed collectives over the default group."""
    size, rank = dist.get_world_size(), dist.get_rank()
    axis = (dist.group.WORLD.group_name, size, rank)  # type: ignore[union-attr]
    return [
        (kind, size, nbytes, measure.collective_seconds(kind, nbytes, axis, device))
        for kind in measure.KINDS
        for nbytes in _SIZES
    ]


def _has_gpu(alone: bool) -> bool:
    return alone and torch.cuda.is_available()


def _memory(device: torch.device, size: int) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / size


def _of_rank_0(profile: Hardware) -> Hardware:
    """The same profile on every rank, so that all ranks plan alike."""
    shared = [profile]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def _profile_to(name: str, node: int | None, path: str) -> None:
    profile = measured_profile(name, node)
    if dist.get_rank() == 0:
        profile.save(path)


def on_gloo_ranks(run: Callable[..., None], ranks: int, *args: Any) -> None:
    """Call `run(*args)` in `ranks` new processes with a gloo group, one thread each.

    Raises:
        HardwareError: One of them failed; its traceback is on stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        processes = [
            context.Process(target=_rank, args=(run, rank, ranks, folder, args), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(_PATIENCE)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
    if any(code != 0 for code in codes):
        raise HardwareError(
            f"measuring on {ranks} gloo ranks",
            f"the processes ended with exit codes {codes}",
            "see the traceback above; ranks=1 measures without collectives",
        )


def _rank(run: Callable[..., None], rank: int, ranks: int, folder: str, args: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    run(*args)
    dist.barrier()
    dist.destroy_process_group()
