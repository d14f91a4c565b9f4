"""Choose, exactly, the cheapest placement of every parameter and op."""

from dataclasses import replace

from tpcompile.cost import CostModel
from tpcompile.errors import ShardingError
from tpcompile.placement import P
from tpcompile.problem import Assignment, Problem
from tpcompile.program import Program
from tpcompile.reasons import conflict
from tpcompile.rule import Rule
from tpcompile.solver import Infeasible

_OUTPUT_BYTE = (0.0, 1e-10, 1e-8, 1e-6)
"""Prices of whole outputs, the lowest first that makes a plan sequence parallel when asked for."""
_MOST = 0.75
"""Of the ops on the residual stream; between two norms of a block there are always some whole."""


def assign_placements(program: Program) -> Program:
    """Set `program.extra["assignment"]` to the cheapest feasible plan.

    Before:  %h = linear(%x, %up)   %y = linear(%h, %down)
    After:   up S(ffn); %h split ffn, out S(ffn); down S(ffn); %y split ffn, out P

    One variable per parameter, per op that depends on one, and per value with several readers;
    costs are seconds of compute, of conversions and of resident bytes. Exact (see `solver`).
    """
    cost: CostModel = program.extra["cost"]
    best, kept = -1.0, None
    for price in _OUTPUT_BYTE if program.extra["sequence_parallel"] is True else (0.0,):
        program.extra["cost"] = replace(cost, output_byte=price)
        problem = Problem(program)
        try:
            solution = problem.solve()
        except Infeasible as error:
            raise _conflict(problem, error) from error
        plan = problem.assignment(solution)
        share = _split_share(program, plan)
        if share > best:
            best, kept = share, (program.extra["cost"], plan, solution.exact)
        if share >= _MOST:
            break
    assert kept is not None
    program.extra["cost"], program.extra["assignment"], exact = kept
    if not exact:
        program.notes.append(
            "the plan is a cheap one, not proved the cheapest: layers share weights"
        )
    return program


def _split_share(program: Program, plan: Assignment) -> float:
    """Of what is done to the residual stream, how much is done to parts of it."""
    widths, weights = set(program.extra["widths"]), program.extra["weights"]
    leaves, unusable = plan.choices.atoms.leaves, plan.choices.unusable
    split = []
    for node, strategy in plan.strategies.items():
        rule: Rule | None = node.meta["rule"]
        if rule is None or rule.contracted() or node not in plan.choices.facts.trained:
            continue
        atoms = {leaf for dims in node.meta["dims"] for dim in dims for leaf in leaves(dim)}
        has_stream = any(atom not in weights and not unusable(atom) for atom in atoms)
        if has_stream and (not widths or widths & atoms):
            split.append(strategy.split is not None or P in strategy.outs)
    return sum(split) / len(split) if split else 1.0


def _conflict(problem: Problem, error: Infeasible) -> Exception:
    """What to raise: the pins that cannot be met together, each of which could be dropped."""
    by_text: dict[str, list[str]] = {}
    for name in problem.pinned:
        by_text.setdefault(problem.pins[name].text, []).append(name)
    dropped: set[str] = set()
    for names in by_text.values():
        try:
            problem.solve(without=dropped | set(names))
        except Infeasible:
            dropped |= set(names)
    needed = {text: names for text, names in by_text.items() if not set(names) <= dropped}
    if not needed:
        return AssertionError(f"no placement is feasible: {error}")
    one = "it" if len(needed) == 1 else "one of them"
    return ShardingError(
        f"plan= asks for {' and '.join(needed)} on {problem.cost.size} ranks.",
        f"{conflict(problem, [name for names in needed.values() for name in names])}.",
        f"drop {one} from plan= and let tpcompile choose",
    )


__all__ = ["Assignment", "assign_placements"]
