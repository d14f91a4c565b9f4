"""Shard a model that cannot be captured whole: block by block, everything else replicated.

The forward of the model stays Python.  What it reads outside of sharded blocks is the same on all
ranks, and so are the blocks' inputs and outputs, so all that is computed there is, too.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from tpcompile.errors import CaptureError, ShardingError
from tpcompile.parameters import slots
from tpcompile.plan import Plan, PlannedParameter
from tpcompile.planning import block_paths
from tpcompile.problem import Pin
from tpcompile.program import Program
from tpcompile.structure import flatten, is_tensor

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""
Planned = Callable[[str, nn.Module, Call], Program]
"""(prefix of its parameters' names, module, call of it) -> its planned program."""
T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """A module that is captured by itself: the whole model, or one block."""

    path: str
    """"" for the model."""
    program: Program
    call: Call

    @property
    def prefix(self) -> str:
        """What the names of its parameters begin with."""
        return f"{self.path}." if self.path else ""

    def named(self, by_own_name: Mapping[str, T]) -> dict[str, T]:
        """By the names that things have in the whole model."""
        return {self.prefix + name: each for name, each in by_own_name.items()}

    def own(self, by_name: Mapping[str, T]) -> dict[str, T]:
        """Of things of the whole model those inside, by the names they have there."""
        prefix = self.prefix
        return {n.removeprefix(prefix): e for n, e in by_name.items() if n.startswith(prefix)}


@dataclass(frozen=True)
class Parts:
    """What is captured of a model."""

    parts: tuple[Part, ...]
    reason: str = ""
    """Why the whole model is not."""
    left: tuple[str, ...] = ()
    """Which blocks are not, and why."""

    def __iter__(self) -> Iterator[Part]:
        return iter(self.parts)

    def check_pins(self, pins: Mapping[str, Pin]) -> None:
        """Raise ShardingError where a pin asks to split what stays outside of the parts."""
        for name, pin in pins.items():
            if pin.splits and not any(name.startswith(part.prefix) for part in self.parts):
                raise ShardingError(
                    f"plan= asks for {pin.text}.",
                    f"{name} is outside of the blocks that were captured (partial=True).",
                    "drop it from plan=: what is outside is replicated",
                )

    def programs(self) -> dict[str, Program]:
        """By path."""
        return {part.path: part.program for part in self.parts}


def parts_of(model: nn.Module, call: Call, planned: Planned, *, partial: bool) -> Parts:
    """The model whole; where that cannot be captured and `partial`, the blocks that can.

    Raises:
        CaptureError: Nothing can.
    """
    try:
        return Parts((Part("", planned("", model, call), call),))
    except CaptureError as error:
        if not partial:
            raise
        reason = error
    found: list[Part] = []
    left: list[str] = []
    paths = sorted(block_paths(model))
    while paths:
        failed = _capture_each(model, call, paths, planned, found, left)
        paths = [f"{path}.{name}" for path in failed for name in _children(model, path)]
    if not found:
        raise CaptureError(
            f"shard {type(model).__name__} block by block, as partial=True allows",
            "; ".join(left) or f"it runs no repeated blocks; whole, {reason.found}",
            "keep blocks in an nn.ModuleList, and what cannot be traced outside of them",
        ) from reason
    return Parts(tuple(found), reason.found, tuple(left))


def _capture_each(
    model: nn.Module,
    call: Call,
    paths: list[str],
    planned: Planned,
    found: list[Part],
    left: list[str],
) -> list[str]:
    """Add to `found` what can be captured, to `left` why others cannot; the paths of those."""
    calls, failed = _calls_of(model, call, paths), []
    for path in paths:
        module = model.get_submodule(path)
        if path not in calls:
            left.append(f"{path} is replicated: the example inputs do not reach it")
        elif _shares_parameters(model, module):
            left.append(f"{path} is replicated: modules outside of it share its parameters")
        else:
            try:
                found.append(Part(path, planned(f"{path}.", module, calls[path]), calls[path]))
            except CaptureError as error:
                left.append(f"{path} is replicated but for modules in it: {error.found}")
                failed.append(path)
    return failed


def _children(model: nn.Module, path: str) -> list[str]:
    """Names of a module's children that have parameters."""
    children = model.get_submodule(path).named_children()
    return [name for name, child in children if next(child.parameters(), None) is not None]


def _calls_of(model: nn.Module, call: Call, paths: list[str]) -> dict[str, Call]:
    """Arguments of the first call of every module named, from a run of the model."""
    calls: dict[str, Call] = {}

    def note(path: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if path not in calls:
            calls[path] = _leaves((args, kwargs))

    handles = [
        model.get_submodule(path).register_forward_pre_hook(
            functools.partial(note, path), with_kwargs=True
        )
        for path in paths
    ]
    try:
        with _kept_as_it_is(model):
            model(*call[0], **call[1])
    except Exception as error:
        raise CaptureError(
            f"run {type(model).__name__} once, to see what its blocks are called with",
            f"{type(error).__name__}: {error}",
            "shard it on a device, not on meta, with inputs that its forward takes",
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return calls


@contextmanager
def _kept_as_it_is(model: nn.Module) -> Iterator[None]:
    """Undo what a run does to buffers and to the random stream."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {t.device for t in model.parameters() if t.is_cuda}
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def _leaves(call: Call) -> Call:
    tensors, structure, _ = flatten(call, is_tensor)
    kept = (t.detach().clone().requires_grad_(t.requires_grad) for t in tensors)
    return structure.unflatten(kept)


def _shares_parameters(model: nn.Module, block: nn.Module) -> bool:
    inside = set(block.modules())
    return any(len({place.module in inside for place in places}) == 2 for places in slots(model))


def joined_plan(model: nn.Module, parts: Parts) -> Plan:
    """The plans of all parts as one."""
    plans: dict[str, Plan] = {p.path: model.get_submodule(p.path).plan for p in parts}  # type: ignore
    known = {
        f"{path}.{each.name}": replace(each, name=f"{path}.{each.name}")
        for path, plan in plans.items()
        for each in plan.parameters
    }
    rest = {
        name: PlannedParameter(name, tuple(p.shape), tuple(p.shape), "replicated", "R")
        for name, p in model.named_parameters()
    }
    first = next(iter(plans.values()))
    return replace(
        first,
        parameters=tuple(known.get(name, each) for name, each in rest.items()),
        collectives=tuple(
            replace(c, path=f"{path}.{c.path}".rstrip("."))
            for path, plan in plans.items()
            for c in plan.collectives
        ),
        replicated_ops=tuple(
            (op, f"{path}.{at}".rstrip("."))
            for path, plan in plans.items()
            for op, at in plan.replicated_ops
        ),
        seconds=sum(plan.seconds for plan in plans.values()),
        notes=(
            f"captured block by block: {parts.reason}",
            *parts.left,
            *dict.fromkeys(note for plan in plans.values() for note in plan.notes),
        ),
    )
