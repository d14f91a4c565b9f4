"""The one list that joins the passes, and the runner that verifies, times and dumps each."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tpcompile import recording
from tpcompile.cache_plan import planned_entries
from tpcompile.caches import Entries
from tpcompile.cost import CostModel
from tpcompile.dump import dump
from tpcompile.errors import InputError
from tpcompile.hardware import Hardware
from tpcompile.labels import mark_states
from tpcompile.passes.assign_placements import assign_placements
from tpcompile.passes.bucket_gradients import bucket_gradients
from tpcompile.passes.certify_cost import certify_cost
from tpcompile.passes.eliminate_redundant import eliminate_redundant
from tpcompile.passes.find_causal_masks import find_causal_masks
from tpcompile.passes.find_dims import find_dims
from tpcompile.passes.functionalize import functionalize
from tpcompile.passes.fuse_linears import fuse_linears
from tpcompile.passes.inline_regions import inline_regions
from tpcompile.passes.insert_collectives import insert_collectives
from tpcompile.passes.localize import localize
from tpcompile.passes.mark_blocks import mark_blocks
from tpcompile.passes.name_dims import name_dims
from tpcompile.passes.normalize import normalize
from tpcompile.passes.overlap_collectives import overlap_collectives
from tpcompile.passes.split_blocks import split_blocks
from tpcompile.plan import collectives_of, styles_of
from tpcompile.profiles import DEFAULT
from tpcompile.program import Program

Pass = Callable[[Program], Program]

NORMALIZE: list[Pass] = [inline_regions, functionalize, normalize, find_causal_masks]
PLAN: list[Pass] = [
    name_dims,
    find_dims,
    assign_placements,
    insert_collectives,
    eliminate_redundant,
    certify_cost,
    mark_blocks,
]
LOCALIZE: list[Pass] = [localize, bucket_gradients, fuse_linears, overlap_collectives]
EMIT: list[Pass] = [split_blocks]

OwnPasses = Mapping[str, Pass | Sequence[Pass]]
"""Name of a pass -> passes of a user that run after it."""


@dataclass(frozen=True)
class Stage:
    """What the runner recorded of one pass."""

    name: str
    seconds: float
    """CPU seconds."""
    nodes: int
    """Calls after the pass."""
    dump: str
    """Text of the program after the pass; "" unless dumps were asked for."""


def run(program: Program, passes: list[Pass], *, dumps: bool = False) -> Program:
    """Run passes in order; after each, check the graph and record a `Stage`."""
    stages = program.extra.setdefault("stages", [])
    dumps = dumps or recording.is_on()
    with _no_collection():
        if dumps and not stages:
            _record(program, Stage("capture", 0.0, sum(1 for _ in program.calls()), dump(program)))
        for step in _with_own(program, passes):
            begin = time.process_time()
            program = _checked(step, step(program))
            seconds = time.process_time() - begin
            program.graph.lint()
            nodes = sum(1 for _ in program.calls())
            text = dump(program) if dumps else ""
            _record(program, Stage(_name(step), seconds, nodes, text))
    return program


def own_passes(passes: OwnPasses | None) -> dict[str, tuple[Pass, ...]]:
    """What `passes=` asks for, checked: name of one of our passes -> the user's after it.

    Raises:
        InputError: No pass has that name, or something is no function.
    """
    ours = [step.__name__ for step in (*NORMALIZE, *PLAN, *LOCALIZE, *EMIT)]
    found = {}
    for name, given in (passes or {}).items():
        if name not in ours:
            raise InputError(
                f"passes= after {name!r}",
                "no pass has that name",
                f"the passes are {', '.join(ours)}",
            )
        found[name] = tuple(given) if isinstance(given, Sequence) else (given,)
        for each in found[name]:
            if not callable(each):
                raise InputError(
                    f"passes= after {name!r}",
                    f"{each!r} is not a function",
                    "pass functions that take a Program and return it",
                )
    return found


def _with_own(program: Program, passes: list[Pass]) -> list[Pass]:
    own: dict[str, tuple[Pass, ...]] = program.extra.get("own_passes", {})
    return [each for step in passes for each in (step, *own.get(step.__name__, ()))]


def _name(step: Pass) -> str:
    return getattr(step, "__name__", type(step).__name__)


def _checked(step: Pass, result: Any) -> Program:
    if not isinstance(result, Program):
        raise InputError(
            f"run the pass {_name(step)}",
            f"it gave {type(result).__name__}",
            "return the program",
        )
    return result


def _record(program: Program, stage: Stage) -> None:
    stages: list[Stage] = program.extra["stages"]
    if recording.is_on():
        recording.write_stage(program, len(stages), stage.name, stage.dump)
    stages.append(stage)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Passes make many small objects and little garbage; collecting took a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def plan(
    program: Program,
    size: int,
    *,
    sequence_parallel: bool | str = "auto",
    outputs: str = "replicated",
    pins: dict[str, Any] | None = None,
    hardware: Hardware = DEFAULT,
    caches: Entries | None = None,
    overlap_chunks: int | str = 1,
    dumps: bool = False,
) -> Program:
    """Decide and insert: a normalized program to one with placements and collectives.

    `caches` says how tensors of caches are dealt out so far; None: they are whole, as outputs are.
    """
    if sequence_parallel == "auto" and program.out_spec is not None and program.out_spec.after:
        sequence_parallel = False  # one graph for prompts of any length
    program.extra.update(
        cost=CostModel(size, hardware, split_light=sequence_parallel is not False),
        sequence_parallel=sequence_parallel,
        outputs=outputs,
        caches=caches,
        overlap_chunks=overlap_chunks,
        pins=(pins or {}) if size > 1 else {},  # one rank holds everything, pinned or not
    )
    program = run(program, PLAN, dumps=dumps)
    program.extra["collectives"] = collectives_of(program)
    program.extra["styles"] = styles_of(program)
    mark_states(program)
    program.extra["cache_entries"] = planned_entries(program)
    if recording.is_on():
        recording.write_planned(program)
    return program


def local(program: Program, axis: tuple[str, int, int], *, dumps: bool = False) -> Program:
    """Cut a planned program to what one rank runs."""
    program.extra["axis"] = axis
    return run(program, LOCALIZE, dumps=dumps)
