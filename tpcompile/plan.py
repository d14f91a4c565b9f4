"""The plan of a model: how each parameter is stored and which collectives run, as a table."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from tpcompile.dims import Dim
from tpcompile.placement import state_text
from tpcompile.program import Program
from tpcompile.storage import ParamLayout


@dataclass(frozen=True)
class PlannedParameter:
    """One row of the parameter table."""

    name: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    style: str
    """column, row, vocab, split or replicated."""
    placement: str


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

    def __str__(self) -> str:
        return "\n".join((self._parameter_table(), "", self._collective_table(), *self._notes()))

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


def plan_of(program: Program, layouts: dict[str, ParamLayout]) -> Plan:
    """The plan a planned (and localised) program stands for."""
    assignment = program.extra["assignment"]
    parameters = []
    for node, state in assignment.parameters.items():
        leaf = program.leaves[node.name]
        if leaf.kind == "parameter":
            layout = layouts[leaf.name]
            parameters.append(
                PlannedParameter(
                    leaf.name, layout.shape, layout.local_shape(),
                    program.extra["styles"][leaf.name],
                    state_text(state),
                )
            )
    return Plan(
        program.extra["cost"].size,
        tuple(parameters),
        tuple(program.extra["collectives"]),
        tuple(program.extra.get("replicated_ops", ())),
        assignment.ticks * 1e-12,
        tuple(program.notes),
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
                    what.step.function, node.meta.get("path", ""), what.step.forward, backward,
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
        if program.leaves[node.name].kind == "parameter"
    }


def style_of(node: Any, state: Any) -> str:
    """The Megatron name of a parameter's placement, from how its readers use the split dim."""
    if not isinstance(state, Dim):
        return "replicated"
    from tpcompile.dims import contains

    for user in node.users:
        rule = user.meta.get("rule")
        if rule is None:
            continue
        names = {n for n, d in user.meta["bound"].items() if contains(d, state)}
        if names & rule.contracted():
            return "vocab" if "embedding" in str(user.target) else "row"
        return "column"
    return "split"


def _fold(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Rows that differ in one number of the name become one with a count."""
    import re

    found: dict[tuple[Any, ...], int] = {}
    for name, shape, local, style, placement in rows:
        def fold(text: str) -> str:
            return re.sub(r"(^|\.)\d+(?=\.)", r"\1*", text)

        key = (fold(name), _by(shape), _by(local), style, fold(placement))
        found[key] = found.get(key, 0) + 1
    return [(*key, f"x {n}" if n > 1 else "") for key, n in found.items()]


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
