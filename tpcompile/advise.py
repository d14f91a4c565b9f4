"""`advise`: which degree of tensor parallelism a model wants on a machine, and why."""

import time
from collections.abc import Sequence
from typing import Any

from torch import nn

from tpcompile.advice import Advice
from tpcompile.cost import hint
from tpcompile.degrees import Degree, block_of, degree_for
from tpcompile.errors import InputError
from tpcompile.hardware import Hardware
from tpcompile.layout3d import Job, best_layout, smallest_layout
from tpcompile.memory import optimizer_for
from tpcompile.planning import Inputs, arguments_of, captured
from tpcompile.profiles import hardware_for
from tpcompile.program import Program

DEGREES = (1, 2, 4, 8, 16, 32, 64)


def advise(
    model: nn.Module,
    example_inputs: Inputs = None,
    *,
    hardware: Hardware | str | Any = "h100-nvlink",
    degrees: Sequence[int] = DEGREES,
    gpus: int | None = None,
    memory: float | None = None,
    optimizer: str = "adamw",
    global_batch: int | None = None,
) -> Advice:
    """What each degree would cost, which one to use, and when to use other parallelism.

    The model is captured once and may be on the meta device; each degree is then planned by the
    solver that `shard` uses, twice: as it decides and with sequence parallelism the other way.

    Args:
        model: As for `shard`; its dtype is what it trains in.
        example_inputs: One micro-batch, as for `shard`.
        hardware: A profile's name, a `Hardware`, or a file with one.
        degrees: Ascending.
        gpus: Devices there are; asks for the fastest TP x PP x DP layout of exactly so many.
        memory: Bytes of one device; None: what the profile says.
        optimizer: Name of `tpcompile.memory.OPTIMIZERS`; "adamw" keeps its state in the
            parameters' dtype, "adamw-mixed" as Megatron does.
        global_batch: Samples of one optimizer step, which is what pipelines and data parallelism
            divide; None: 32 micro-batches for each pipeline.

    Returns:
        Prints as a table; `to_json()` and `plot(path)`.

    Raises:
        TpcompileError: The model, inputs, hardware or degrees do not do.
    """
    begin = time.monotonic()
    sizes = sorted(set(degrees))
    if not sizes or sizes[0] < 1:
        raise InputError(
            f"advise(degrees={tuple(degrees)})",
            "degrees are numbers of ranks, at least 1, and at least one of them",
            "degrees=(1, 2, 4, 8)",
        )
    machine = hardware_for(hardware)
    room = machine.memory if memory is None else memory
    policy = optimizer_for(optimizer)
    program = captured(model, *arguments_of(model, example_inputs))
    capturing = time.monotonic() - begin
    found = [degree_for(program, size, machine, room, policy) for size in sizes]
    batch, tokens = _samples(program)
    job = Job(machine, room, _blocks(program), batch, _stream(program, found[0]), global_batch)
    return Advice(
        model=type(model).__name__,
        degrees=tuple(found),
        job=job,
        optimizer=policy.name,
        tokens=tokens,
        smallest=smallest_layout(found, job, gpus),
        layout=None if gpus is None else best_layout(found, job, gpus),
        gpus=gpus,
        seconds=(capturing, time.monotonic() - begin),
    )


def _samples(program: Program) -> tuple[int, int]:
    """(samples, tokens) of the inputs; tokens are dims 0 and 1 of the first integer input."""
    inputs = [node.meta["val"] for node in program.placeholders("input")]
    for val in inputs:
        if val.ndim >= 2 and not val.is_floating_point():
            return hint(val.shape[0]), hint(val.shape[0]) * hint(val.shape[1])
    batch = next((hint(val.shape[0]) for val in inputs if val.ndim), 1)
    return batch, batch


def _blocks(program: Program) -> int:
    """Repeated blocks that have parameters."""
    names = (program.leaves[node.name].name for node in program.placeholders("parameter"))
    return len({block_of(program, name) for name in names} - {""})


def _stream(program: Program, first: Degree) -> float:
    """Bytes that pass from one block to the next, on one device."""
    parts = first.size if first.sequence_parallel else 1
    return first.block_inputs * parts / max(_blocks(program), 1)
