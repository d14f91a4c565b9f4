"""What a user asks of parameters: placements by name pattern, a `Plan`, or a plan's file."""

import fnmatch
import os
from collections.abc import Mapping
from typing import Any

from torch import fx, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from tpcompile.dims import Dim, contains
from tpcompile.errors import InputError, ShardingError
from tpcompile.hardware import Hardware
from tpcompile.passes.localize import layout_for
from tpcompile.placement import R, State, state_text
from tpcompile.plan import Plan, PlannedParameter
from tpcompile.plan_text import placement_from, placement_text
from tpcompile.problem import Pin
from tpcompile.reasons import unsplit
from tpcompile.storage import ParamLayout
from tpcompile.strategies import Choices

PlanLike = Plan | Mapping[str, Any] | str | os.PathLike[str] | None
"""A `Plan`, its file or the dict of it, or placements by name pattern."""


def plan_from(plan: PlanLike) -> Plan | Mapping[str, Any] | None:
    """The plan, a file or its dict read into one; placements by pattern stay what they are."""
    if isinstance(plan, (str, os.PathLike)):
        return Plan.load(plan)
    if isinstance(plan, Mapping) and isinstance(plan.get("parameters"), Mapping):
        return Plan.from_json(plan)
    return plan


def sequence_parallel_for(asked: bool | str, plan: PlanLike) -> bool | str:
    """What is asked, or where nothing is, what a plan was made with.

    Raises:
        InputError: Something else than True, False or "auto" is asked.
    """
    if asked not in (True, False, "auto"):
        raise InputError(
            f"sequence_parallel={asked!r}",
            "it says neither yes nor no",
            'pass True, False, or "auto" to let the cost decide',
        )
    made = plan_from(plan)
    return made.sequence_parallel if asked == "auto" and isinstance(made, Plan) else asked


def outputs_for(asked: str) -> str:
    """What is asked of outputs.

    Raises:
        InputError: It is neither "replicated" nor "sharded".
    """
    if asked not in ("replicated", "sharded"):
        raise InputError(
            f"outputs={asked!r}",
            "outputs are whole on every rank, or DTensors where they are split",
            'pass "replicated" or "sharded"',
        )
    return asked


def overlap_chunks_for(asked: int | str) -> int | str:
    """What is asked of chunks.

    Raises:
        InputError: It is neither a number of chunks nor "auto".
    """
    if asked != "auto" and (not isinstance(asked, int) or isinstance(asked, bool) or asked < 1):
        raise InputError(
            f"overlap_chunks={asked!r}",
            "it is the number of chunks in which linears and their collectives run",
            'pass 1 (no chunks), more, or "auto" to let the cost decide',
        )
    return asked


def plan_options(
    model: nn.Module,
    plan: PlanLike,
    sequence_parallel: bool | str,
    outputs: str,
    hardware: Hardware,
    overlap_chunks: int | str = 1,
) -> dict[str, Any]:
    """What a user asks for, checked, as keyword arguments of `pipeline.plan`.

    Raises:
        TpcompileError: One of them means nothing, or not for this model.
    """
    return {
        "sequence_parallel": sequence_parallel_for(sequence_parallel, plan),
        "outputs": outputs_for(outputs),
        "pins": pins_from_plan(model, plan),
        "hardware": hardware,
        "overlap_chunks": overlap_chunks_for(overlap_chunks),
    }


def pins_from_plan(model: nn.Module, plan: PlanLike) -> dict[str, Pin]:
    """Pins by parameter name from a `plan=`; of several patterns that fit, the last one counts.

    Raises:
        ShardingError: A pattern names no parameter, or a placement is not Shard or Replicate.
    """
    given = plan_from(plan)
    if isinstance(given, Plan):
        wanted: Mapping[str, Any] = {p.name: p for p in given.parameters}
    else:
        wanted = given or {}
    pins: dict[str, Pin] = {}
    first: dict[int, str] = {}
    every = model.named_parameters(remove_duplicate=False)
    names = {name: first.setdefault(id(p), name) for name, p in every}
    for pattern, placement in wanted.items():
        matching = [pattern] if pattern in names else fnmatch.filter(names, pattern)
        if not matching:
            raise ShardingError(
                f"plan= places {pattern!r}.",
                f"no parameter of {type(model).__name__} has that name.",
                f"names look like {next(iter(names))!r}; * matches any part of a name"
                if names
                else "the model has no parameters; drop plan=",
            )
        # Of tied names, the program has the first.
        pins.update(dict.fromkeys((names[m] for m in matching), _pin(pattern, placement)))
    return pins


def _pin(pattern: str, wanted: Any) -> Pin:
    split = ""
    if isinstance(wanted, PlannedParameter):
        wanted, split = wanted.stored, wanted.placement
    placement = placement_from(wanted) if isinstance(wanted, str) else wanted
    if not isinstance(placement, (Shard, Replicate)):
        raise ShardingError(
            f"plan= places {pattern!r} as {placement!r}.",
            "a parameter can be Shard(dim) or Replicate().",
            "use one of torch.distributed.tensor's Shard and Replicate",
        )

    def keep(node: fx.Node, states: list[State], choices: Choices) -> list[State]:
        kept = _stored_as(node, states, placement)
        if not kept:
            raise _unmet(node, pattern, placement, choices)
        # A plan also says which unit of the dim is dealt out: as long as it fits, keep to it.
        return [s for s in kept if state_text(s) == split] or kept

    splits = isinstance(placement, Shard)
    return Pin(f"{pattern!r} as {placement_text(placement)}", splits, keep)


def _stored_as(node: fx.Node, states: list[State], placement: Placement) -> list[State]:
    if not isinstance(placement, Shard):
        return [s for s in states if s == R]
    dims = node.meta["dims"][0]
    dim = placement.dim + len(dims) * (placement.dim < 0)
    wanted = dims[dim] if 0 <= dim < len(dims) else None
    return [s for s in states if isinstance(s, Dim) and wanted is not None and contains(wanted, s)]


def _unmet(node: fx.Node, pattern: str, placement: Shard, choices: Choices) -> ShardingError:
    shape, dims = list(node.meta["val"].shape), node.meta["dims"][0]
    if -len(dims) <= placement.dim < len(dims):
        reason = unsplit(node, dims[placement.dim], choices)
        found = f"it is {shape}; {reason}" if reason else f"it is {shape} and cannot be split there"
    else:
        found = f"it is {shape}, which has {len(dims)} dims"
    return ShardingError(
        f"plan= asks for {pattern!r} as {placement_text(placement)} on {choices.cost.size} ranks.",
        f"{found}.",
        "use a degree that divides it, or drop it from plan= and let tpcompile choose",
    )


def pins_from_layouts(layouts: Mapping[str, ParamLayout]) -> dict[str, Pin]:
    """Pins that keep every parameter stored as it is, for another capture of a sharded model."""
    return {name: _as_stored(name, layout) for name, layout in layouts.items()}


def _as_stored(name: str, layout: ParamLayout) -> Pin:
    def keep(node: fx.Node, states: list[State], choices: Choices) -> list[State]:
        if not node.users:
            return states  # this call does not read it
        same = [s for s in states if layout_for(node, s, choices.sizes, layout.size) == layout]
        if not same:
            raise ShardingError(
                f"plan a call of another kind, with {name} as it is stored.",
                f"in its graph the parameter cannot be split so: {layout}",
                "shard another copy of the model with such inputs",
            )
        return same

    return Pin(f"{name!r} as it is stored", layout.dim is not None, keep)
