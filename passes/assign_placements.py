"""Choose, exactly, the cheapest placement of every parameter and op."""

from tpcompile.errors import ShardingError
from tpcompile.problem import Assignment, Problem
from tpcompile.program import Program
from tpcompile.reasons import conflict
from tpcompile.solver import Infeasible


def assign_placements(program: Program) -> Program:
    """Set `program.extra["assignment"]` to the cheapest feasible plan.

    Before:  %h = linear(%x, %up)   %y = linear(%h, %down)
    After:   up S(ffn); %h split ffn, out S(ffn); down S(ffn); %y split ffn, out P

    One variable per parameter, per op that depends on one, and per value with several readers;
    costs are seconds of compute, of conversions and of resident bytes. Exact (see `solver`).
    """
    problem = Problem(program)
    try:
        solution = problem.solve()
    except Infeasible as error:
        raise _conflict(problem, error) from error
    if not solution.exact:
        program.notes.append(
            "the plan is a cheap one, not proved the cheapest: layers share weights"
        )
    program.extra["assignment"] = problem.assignment(solution)
    return program


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
