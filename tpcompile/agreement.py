"""All ranks of an axis must hold the same model, inputs and plan; else all raise the same error."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpcompile import recording
from tpcompile.capture_inputs import bind_inputs
from tpcompile.dump import dump
from tpcompile.errors import RankMismatchError, TpcompileError
from tpcompile.program import Program

Decision = TypeVar("Decision")

PATIENCE = timedelta(minutes=10)
"""How far apart ranks may be when one of them needs a new graph."""


def agree(
    asked: str,
    decide: Callable[[], Decision],
    prints_of: Callable[[Decision], dict[str, str]],
    programs_of: Callable[[Decision], Iterable[Program]],
    group: dist.ProcessGroup,
) -> Decision:
    """What `decide` returns, after every rank of the group decided the same.

    Args:
        asked: What is being done, for errors.
        decide: May fail.
        prints_of: Fingerprints of a decision by name, in order of importance.
        programs_of: What to dump where ranks decide otherwise.
        group: Of the axis.

    Raises:
        TpcompileError: This rank's own, or another's, so that none waits for a rank that left.
        RankMismatchError: Naming the first thing that differs.
    """
    error: Exception | None = None
    failure: tuple[str, str] | None = None
    decision: Decision | None = None
    prints: dict[str, str] = {}
    try:
        decision = decide()
        prints = prints_of(decision)
    except TpcompileError as caught:
        error, failure = caught, (f"{caught.asked} {caught.found}", caught.fix)
    except Exception as caught:
        error = caught
        failure = f"{type(caught).__name__}: {caught}", "every rank must run the same program"
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, (failure, prints), group=group)
    if error is not None:
        raise error
    for rank, (failed, theirs) in enumerate(everyone):
        if failed is not None:
            found, fix = failed
            raise TpcompileError(
                asked, f"rank {rank} of the axis failed: {found}", f"on rank {rank}: {fix}"
            )
        try:
            _compare(everyone[0][1], theirs, rank, asked)
        except RankMismatchError:
            assert decision is not None
            for program in programs_of(decision):
                recording.write_disagreement(program, group.rank())
            raise
    assert decision is not None
    return decision


_meetings: Counter[str] = Counter()
"""How often the ranks of a group have met."""


def meet(group: dist.ProcessGroup, asked: str, inputs: str) -> None:
    """Return once all ranks of the group ask the same, before a collective could hang.

    A rank that runs on with a graph it has never comes, and waits in a collective of its own; so
    this goes through the group's store, and gives up after `PATIENCE`.

    Raises:
        RankMismatchError: Another rank asks for other inputs, or does not come.
    """
    _meetings[group.group_name] += 1
    store, size, rank = group.get_group_store(), group.size(), group.rank()
    keys = [f"tpcompile/{_meetings[group.group_name]}/{r}" for r in range(size)]
    store.set(keys[rank], inputs)
    try:
        store.wait(keys, PATIENCE)
    except RuntimeError:  # of a class that depends on the store
        missing = [r for r in range(size) if not store.check([keys[r]])]
        raise RankMismatchError(
            f"{asked} on all ranks of the axis",
            f"rank {rank} has {inputs}; "
            f"{', '.join(f'rank {r}' for r in missing)} did not come in {PATIENCE}",
            "give all ranks of the axis inputs of the same structure and sizes at each step",
        ) from None
    for other, theirs in enumerate(store.get(key).decode() for key in keys):
        if theirs != inputs:
            raise RankMismatchError(
                f"{asked} on all ranks of the axis",
                f"rank {rank} has {inputs}, rank {other} has {theirs}",
                "give all ranks of the axis inputs of the same structure and sizes at each step",
            )


def fingerprints(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    programs: Mapping[str, Program],
) -> dict[str, str]:
    """Name of a thing that must be equal -> what to show of it; a checksum.

    In order of importance. `programs` are by the path of the module they are of.
    """
    modes = [module.training for module in model.modules()]
    found = {"mode": "train" if all(modes) else f"train in part;{modes}" if any(modes) else "eval"}
    for name, parameter in model.named_parameters():
        found[f"parameter {name}"] = tensor_digest(parameter)
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = tensor_digest(buffer)
    tensors, _, names = bind_inputs(model, args, kwargs)
    for name, tensor in zip(names, tensors, strict=True):
        found[f"example input {name}"] = tensor_digest(tensor)
    if any(map(draws_random, programs.values())):
        # Dropout of a value that all ranks hold must drop the same of it.
        found["random seed"] = f"seed {torch.initial_seed()}"
    for path, program in programs.items():
        found[f"plan of {path}" if path else "plan"] = f";{digest(program)}"
    return found


def draws_random(program: Program) -> bool:
    """Whether it drops values at random."""
    drops = program.calls(torch.ops.aten.dropout.default)
    return any(node.args[2] and node.args[1] for node in drops)


def digest(program: Program) -> str:
    """A checksum of the program's text."""
    return hashlib.sha256(dump(program).encode()).hexdigest()


def tensor_digest(tensor: Tensor) -> str:
    """Shape, dtype and, unless on meta, a checksum of the values."""
    head = f"{tuple(tensor.shape)} {tensor.dtype}"
    if tensor.is_meta or not tensor.numel():
        return head
    flat = tensor.detach().reshape(-1)
    kept = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    total = kept.double().sum().item() if kept.dtype != torch.bool else int(kept.sum())
    ends = torch.cat([kept[:64], kept[-64:]]).double().cpu().numpy().tobytes()
    return f"{head};{total!r} {hashlib.sha256(ends).hexdigest()[:16]}"


def _compare(mine: dict[str, str], theirs: dict[str, str], rank: int, asked: str) -> None:
    if mine == theirs:
        return
    keys = [*mine, *(k for k in theirs if k not in mine)]
    what = next(k for k in keys if mine.get(k) != theirs.get(k))
    shown = [found.get(what, "missing").partition(";")[0] for found in (mine, theirs)]
    detail = " and ".join(shown) if shown[0] != shown[1] else "other values"
    raise RankMismatchError(
        f"{asked} on all ranks of the axis",
        f"ranks 0 and {rank} differ in {what}: {detail}",
        "seed all ranks alike (or load the same checkpoint) and give them the same inputs",
    )
