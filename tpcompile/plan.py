"""The plan of a model: how each parameter is stored and which collectives run, as a table."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from tpcompile.dims import Dim, contains
from tpcompile.errors import ShardingError
from tpcompile.placement import state_text
from tpcompile.plan_text import json_text, placement_from, placement_text
from tpcompile.program import Program, operands
from tpcompile.storage import ParamLayout

VERSION = 1
"""Of the JSON form."""


@dataclass(frozen=True)
class PlannedParameter:
    """One row of the parameter table."""

    name: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    style: str
    """column, row, vocab, split or replicated."""
    placement: str
    """Which named dim is split: `S(vocab)`, or `R`."""
    stored: str = "Replicate"
    """Which dim of its storage is: `Shard(0)`, or `Replicate`."""


@dataclass(frozen=True)
class PlannedCollective:
    """One conversion of the plan."""

    kind: str
    path: str
    forward: str
    backward: str
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """What tpcompile decided for one model at one degree. `print(plan)` shows the table."""

    size: int
    parameters: tuple[PlannedParameter, ...]
    collectives: tuple[PlannedCollective, ...]
    replicated_ops: tuple[tuple[str, str], ...]
    """(op, module path) of ops without a rule."""
    seconds: float
    notes: tuple[str, ...] = ()
    hardware: str = ""
    """Name of the profile that it was made for."""
    sequence_parallel: bool | str = "auto"
    """What was asked for."""

    def __str__(self) -> str:
        return "\n".join((self._parameter_table(), "", self._collective_table(), *self._notes()))

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers; `Plan.from_json` undoes it."""
        counts: Counter[tuple[Any, ...]] = Counter(
            (c.kind, c.forward, c.backward, c.path, c.nbytes) for c in self.collectives
        )
        keys = ("kind", "forward", "backward", "path", "nbytes", "count")
        return {
            "version": VERSION,
            "degree": self.size,
            "hardware": self.hardware,
            "sequence_parallel": self.sequence_parallel,
            "seconds": self.seconds,
            "parameters": {
                p.name: {
                    "placement": p.stored,
                    "splits": p.placement,
                    "style": p.style,
                    "shape": list(p.shape),
                    "local_shape": list(p.local),
                }
                for p in self.parameters
            },
            "collectives": [dict(zip(keys, (*key, n), strict=True)) for key, n in counts.items()],
            "replicated_ops": [list(each) for each in self.replicated_ops],
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Plan":
        """The plan that `to_json` wrote; of what people write, `parameters` alone is needed.

        Raises:
            ShardingError: A version that is not known, or a parameter without a placement.
        """
        if data.get("version", VERSION) != VERSION:
            raise ShardingError(
                f"cannot read a plan of version {data['version']}.",
                f"this tpcompile reads version {VERSION}.",
                "save the plan again with this version, or use the one that wrote it",
            )
        return cls(
            size=data.get("degree", 0),
            parameters=tuple(_parameter(n, each) for n, each in data["parameters"].items()),
            collectives=tuple(
                PlannedCollective(c["kind"], c["path"], c["forward"], c["backward"], c["nbytes"])
                for c in data.get("collectives", ())
                for _ in range(c["count"])
            ),
            replicated_ops=tuple((op, path) for op, path in data.get("replicated_ops", ())),
            seconds=data.get("seconds", 0.0),
            notes=tuple(data.get("notes", ())),
            hardware=data.get("hardware", ""),
            sequence_parallel=data.get("sequence_parallel", "auto"),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, one parameter a line, to be read, edited and loaded."""
        Path(path).write_text(json_text(self.to_json()))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """The plan in a file.

        Raises:
            ShardingError: The file is no plan.
        """
        try:
            data = json.loads(Path(path).read_text())
            if not isinstance(data["parameters"], dict):
                raise TypeError("parameters is not a dict by name")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ShardingError(
                f"cannot read a plan from {os.fspath(path)}.",
                f"{type(error).__name__}: {error}.",
                "pass a file that Plan.save wrote, or placements by parameter name",
            ) from error
        return cls.from_json(data)

    def _parameter_table(self) -> str:
        rows = _fold([(p.name, p.shape, p.local, p.style, p.placement) for p in self.parameters])
        return tabulate(rows, ["parameter", "global", "local", "style", "placement", ""])

    def _collective_table(self) -> str:
        counted = Counter((c.kind, c.forward or "-", c.backward or "-") for c in self.collectives)
        rows = [(*key, count) for key, count in sorted(counted.items())]
        return tabulate(rows, ["conversion", "forward", "backward", "count"])

    def _notes(self) -> list[str]:
        listed = sorted({f"{op} in {path or 'the root'}" for op, path in self.replicated_ops})
        head = [f"replicated for want of a rule: {line}" for line in listed]
        return [*head, *self.notes]


def _parameter(name: str, data: Mapping[str, Any] | str) -> PlannedParameter:
    each = {"placement": data} if isinstance(data, str) else data
    if "placement" not in each:
        raise ShardingError(
            f"cannot read the plan of {name}.",
            f"it has {', '.join(each) or 'nothing'}, but no placement.",
            'give it "placement": "Shard(0)" or "Replicate"',
        )
    placement = placement_text(placement_from(each["placement"]))
    shape, local = (tuple(map(int, each.get(key, ()))) for key in ("shape", "local_shape"))
    style, splits = each.get("style", ""), each.get("splits", "")
    return PlannedParameter(name, shape, local, style, splits, placement)


def plan_of(program: Program, layouts: dict[str, ParamLayout]) -> Plan:
    """The plan a planned (and localised) program stands for."""
    assignment = program.extra["assignment"]
    cost = program.extra["cost"]
    parameters = []
    for node, state in assignment.parameters.items():
        leaf = program.leaves[node.name]
        if leaf.kind == "parameter":
            layout = layouts[leaf.name]
            parameters.append(
                PlannedParameter(
                    leaf.name,
                    layout.shape,
                    layout.local_shape(),
                    program.extra["styles"][leaf.name],
                    state_text(state),
                    "Replicate" if layout.dim is None else f"Shard({layout.dim})",
                )
            )
    return Plan(
        cost.size,
        tuple(parameters),
        tuple(program.extra["collectives"]),
        tuple(program.extra.get("replicated_ops", ())),
        assignment.ticks * 1e-12,
        tuple(program.notes),
        cost.hardware.name,
        program.extra["sequence_parallel"],
    )


def collectives_of(program: Program) -> tuple[PlannedCollective, ...]:
    """The conversions of a planned program, in graph order."""
    found = []
    for node in program.calls():
        what = node.meta.get("conversion")
        if what is not None:
            backward = what.step.backward if what.value.trained else ""
            found.append(
                PlannedCollective(
                    what.step.function,
                    node.meta.get("path", ""),
                    what.step.forward,
                    backward,
                    what.value.nbytes,
                )
            )
    return tuple(found)


def styles_of(program: Program) -> dict[str, str]:
    """Style of every parameter by name."""
    states = program.extra["assignment"].parameters
    return {
        program.leaves[node.name].name: style_of(node, state)
        for node, state in states.items()
        if program.is_parameter(node)
    }


def style_of(node: Any, state: Any) -> str:
    """The Megatron name of a parameter's placement, from how its readers use the split dim."""
    if not isinstance(state, Dim):
        return "replicated"
    for user in _uses(node, state):
        rule = user.meta.get("rule")
        if rule is None:
            continue
        names = {n for n, d in user.meta["bound"].items() if contains(d, state)}
        if names & rule.contracted():
            return "vocab" if "embedding" in str(user.target) else "row"
        return "column"
    return "split"


def _uses(node: Any, state: Dim) -> Iterator[Any]:
    """Calls that use a weight, also by way of a transpose, a view or an index."""
    for user in node.users:
        if user.op == "call_function" and user.meta.get("rule") is not None:
            floats = [n for n in operands(user) if n.meta["val"].is_floating_point()]
            carries = any(
                d is not None and contains(d, state) for dims in user.meta["dims"] for d in dims
            )
            if carries and len(floats) == 1 and "embedding" not in str(user.target):
                yield from _uses(user, state)
                continue
        yield user


def _fold(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Rows that differ in one number of the name become one with a count."""
    found: dict[tuple[Any, ...], int] = {}
    for name, shape, local, style, placement in rows:

        def fold(text: str) -> str:
            return re.sub(r"(^|\.)\d+(?=\.)", r"\1*", text)

        key = (fold(name), _by(shape), _by(local), style, fold(placement))
        found[key] = found.get(key, 0) + 1
    return [(*key, f"x {n}" if n > 1 else "") for key, n in found.items()]


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
