"""All ranks of an axis must hold the same model, inputs and plan; else all raise the same error."""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpcompile.dump import dump
from tpcompile.errors import RankMismatchError, TpcompileError
from tpcompile.program import Program
from tpcompile.structure import flatten, is_tensor

Decision = tuple[Program, tuple[Any, ...], dict[str, Any]]


def agree(model: nn.Module, decide: Callable[[], Decision], group: dist.ProcessGroup) -> Decision:
    """What `decide` returns, after every rank of the group decided the same.

    Raises:
        TpcompileError: This rank's own, or another's, so that none waits for a rank that left.
        RankMismatchError: Naming the first thing that differs.
    """
    error: Exception | None = None
    decision: Decision | None = None
    prints: dict[str, str] = {}
    try:
        decision = decide()
        prints = fingerprints(model, *decision)
    except Exception as caught:
        error = caught
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (None if error is None else str(error), prints), group=group)
    if error is not None:
        raise error
    for rank, (message, theirs) in enumerate(everyone):
        if message is not None:
            raise TpcompileError(
                f"shard {type(model).__name__}",
                f"rank {rank} of the axis failed: {message}",
                "fix it there; every rank must run the same program",
            )
        _compare(everyone[0][1], theirs, rank, type(model).__name__)
    assert decision is not None
    return decision


def fingerprints(
    model: nn.Module, program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, str]:
    """Name of a thing that must be equal -> a digest of it, in order of importance."""
    found = {}
    for name, parameter in model.named_parameters():
        found[f"parameter {name}"] = tensor_digest(parameter)
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = tensor_digest(buffer)
    tensors, _, names = flatten((args, kwargs), is_tensor)
    for name, tensor in zip(names, tensors, strict=True):
        found[f"example input {name}"] = tensor_digest(tensor)
    found["plan"] = hashlib.sha256(dump(program).encode()).hexdigest()
    return found


def tensor_digest(tensor: Tensor) -> str:
    """Shape, dtype and, unless on meta, a checksum of the values."""
    head = f"{tuple(tensor.shape)} {tensor.dtype}"
    if tensor.is_meta or not tensor.numel():
        return head
    flat = tensor.detach().reshape(-1)
    kept = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    total = kept.double().sum().item() if kept.dtype != torch.bool else int(kept.sum())
    ends = torch.cat([kept[:64], kept[-64:]]).double().cpu().numpy().tobytes()
    return f"{head} {total!r} {hashlib.sha256(ends).hexdigest()[:16]}"


def _compare(mine: dict[str, str], theirs: dict[str, str], rank: int, name: str) -> None:
    if mine == theirs:
        return
    keys = [*mine, *(k for k in theirs if k not in mine)]
    what = next(k for k in keys if mine.get(k) != theirs.get(k))
    shapes = [str(d.get(what, "missing")).split(") ")[0] for d in (mine, theirs)]
    detail = f"{shapes[0]}) and {shapes[1]})" if shapes[0] != shapes[1] else "other values"
    raise RankMismatchError(
        f"shard {name} on all ranks of the axis",
        f"ranks 0 and {rank} differ in {what}: {detail}",
        "seed all ranks alike (or load the same checkpoint) and give them the same inputs",
    )
