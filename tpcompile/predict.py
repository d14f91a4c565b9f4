"""How long a planned program will take: seconds of arithmetic and of traffic."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from tpcompile.cost import CostModel
from tpcompile.dims import Dim, contains
from tpcompile.layout import share
from tpcompile.placement import step_ticks
from tpcompile.problem import Assignment
from tpcompile.program import Program, values
from tpcompile.strategies import Facts, Strategy
from tpcompile.work import Work


@dataclass(frozen=True)
class Times:
    """Seconds of one forward and (where the model is trained) backward pass on one rank."""

    compute: float
    communication: float
    """In collectives; ranks wait for each, so all of it is exposed."""
    block_compute: float
    """Of `compute`, what the repeated blocks take together."""
    block_communication: float
    by_kind: Mapping[str, float]
    """Communication by collective: all_reduce, all_gather, reduce_scatter, all_to_all."""

    @property
    def step(self) -> float:
        """All of it."""
        return self.compute + self.communication


def predict(program: Program) -> Times:
    """The times of a program that `pipeline.plan` has planned, on the hardware it was planned for.

    Every op is priced as in the plan, without what memory is worth; every collective by
    `CostModel.collective`.  An optimizer's step is not in it.
    """
    plan: Assignment = program.extra["assignment"]
    facts: Facts = program.extra["facts"]
    cost: CostModel = program.extra["cost"]
    compute: dict[bool, float] = defaultdict(float)
    traffic: dict[bool, float] = defaultdict(float)
    by_kind: dict[str, float] = defaultdict(float)
    for node in program.calls():
        inside = bool(node.meta.get("block"))
        if "conversion" in node.meta:
            what = node.meta["conversion"]
            seconds = step_ticks(what.value, what.step, cost) * 1e-12
            first = (
                cost.collective(what.step.forward, what.value.nbytes) if what.step.forward else 0
            )
            by_kind[what.step.forward] += first
            by_kind[what.step.backward] += seconds - first
            traffic[inside] += seconds
        elif values(node) and "rule" in node.meta:
            work = Work(node, node.meta["rule"], cost, node in facts.trained)
            strategy = plan.strategies.get(node)
            compute[inside] += op_seconds(work, strategy, plan)
            inner = _inner_seconds(node, work, strategy, cost)
            traffic[inside] += inner
            by_kind["all_reduce"] += inner
    kinds = {kind: seconds for kind, seconds in sorted(by_kind.items()) if seconds > 1e-12}
    return Times(sum(compute.values()), sum(traffic.values()), compute[True], traffic[True], kinds)


def op_seconds(work: Work, strategy: Strategy | None, plan: Assignment) -> float:
    """Of one call under its strategy; None: replicated."""
    if strategy is None or strategy.split is None:
        return work.seconds(1.0, [False] * len(work.ins), [False] * len(work.outs))
    units = plan.choices.hint(strategy.split)
    fraction = share(units, plan.choices.cost.size, 0) / units
    split_in = [isinstance(state, Dim) for state in strategy.ins]
    split_out = [isinstance(state, Dim) for state in strategy.outs]
    return work.seconds(fraction, split_in, split_out)


def _inner_seconds(node: fx.Node, work: Work, strategy: Strategy | None, cost: CostModel) -> float:
    """Of the all-reduces a rewrite makes itself, forward and backward."""
    rule = node.meta["rule"]
    if rule is None or strategy is None or strategy.split is None:
        return 0.0
    bound: Mapping[str, Dim] = node.meta["bound"]
    if not any(n in bound and contains(bound[n], strategy.split) for n in rule.inner):
        return 0.0
    return 2 * cost.collective("all_reduce", work.inner_bytes())
