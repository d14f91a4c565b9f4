"""Recompute the plan's cost from the graph that will run, and hold the solver to it."""

from tpcompile.placement import step_ticks
from tpcompile.problem import Assignment
from tpcompile.program import Program


def certify_cost(program: Program) -> Program:
    """Set `extra["certificate"]` to (solver's cost, cost of the graph), in picoseconds.

    Before:  the solver says 1200;  %y = linear(%x, %w)   %r = all_reduce(%y)
    After:   certificate (1200, 1200): 1000 for linear and its weight, 200 for all_reduce

    Every node of the graph is priced as it stands, so a plan that is not what the solver priced
    cannot pass.  The graph may only be cheaper: two readers may share a form the solver did not
    foresee.  After a user's own pass over the plan it may cost what it likes.
    """
    plan: Assignment = program.extra["assignment"]
    cost = plan.choices.cost
    total = sum(
        plan.choices.resident_ticks(n, s)
        for n, s in plan.parameters.items()
        if program.is_parameter(n)
    )
    for node in program.calls():
        if node in plan.strategies:
            total += plan.strategies[node].ticks
        elif "conversion" in node.meta:
            what = node.meta["conversion"]
            total += step_ticks(what.value, what.step, cost)
    program.extra["certificate"] = (plan.ticks, total)
    own = program.extra.get("own_passes", {}).keys()
    if not own & {"assign_placements", "insert_collectives", "eliminate_redundant"}:
        assert total <= plan.ticks, f"the graph costs {total} ps, the solver said {plan.ticks}"
    return program
