"""What other plans would have cost: the solver asked again with something forced or let go."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from torch import fx

from tpcompile.cost import bytes_of
from tpcompile.dims import Dim
from tpcompile.formulas import bytes_text, seconds_text
from tpcompile.layout import share
from tpcompile.placement import State
from tpcompile.problem import Assignment, Problem
from tpcompile.solver import Infeasible, Solution


@dataclass(frozen=True)
class Difference:
    """By how much another plan is dearer than the chosen one."""

    price: float
    """Seconds, with what memory is worth: what the solver compares."""
    seconds: float
    """Of time alone, a step."""
    nbytes: float
    """Of parameters, their gradients and Adam's moments, on the rank that has most."""

    def __str__(self) -> str:
        parts = []
        if self.seconds:
            parts.append(f"{seconds_text(abs(self.seconds))} {_more(self.seconds)} a step")
        if self.nbytes:
            parts.append(f"{bytes_text(abs(self.nbytes))} {_more(self.nbytes)} on a rank")
        return ", ".join(parts) or "costs the same"


def _more(amount: float) -> str:
    return "more" if amount > 0 else "less"


def forced(plan: Assignment, node: fx.Node, index: int) -> Difference | None:
    """Of the cheapest plan in which a variable has this value; None where there is none."""
    problem = plan.problem
    variable = problem.variable[node]
    mask = np.full(problem.domains[variable], np.inf)
    mask[index] = 0.0
    try:
        return _difference(plan, problem.solve(extra=[((variable,), mask)]))
    except Infeasible:
        return None


def unpinned(plan: Assignment, names: Collection[str]) -> Difference:
    """Of the chosen plan over the cheapest one without the pins of these parameters."""
    found = _difference(plan, plan.problem.solve(without=names))
    return Difference(-found.price or 0.0, -found.seconds or 0.0, -found.nbytes or 0.0)


def _difference(plan: Assignment, other: Solution) -> Difference:
    problem, price, resident, nbytes = plan.problem, other.cost - plan.ticks, 0.0, 0.0
    chosen = {node.name: state for node, state in plan.parameters.items()}
    for node, states in problem.states.items():
        new, old = states[other.choice[problem.variable[node]]], chosen[node.name]
        leaf = problem.program.leaves[node.name]
        if new != old and leaf.kind == "parameter":
            resident += problem.choices.resident_ticks(node, new)
            resident -= problem.choices.resident_ticks(node, old)
            nbytes += _bytes(problem, node, new) - _bytes(problem, node, old)
    return Difference(price * 1e-12, (price - resident) * 1e-12, nbytes)


def _bytes(problem: Problem, node: fx.Node, state: State) -> float:
    """Of a parameter and what training keeps with it, on the rank that has most."""
    total: float = bytes_of(node.meta["val"])
    if isinstance(state, Dim):
        units = problem.choices.hint(state)
        total *= share(units, problem.cost.size, 0) / units
    return total * (problem.cost.state_factor if node in problem.facts.trained else 1.0)
