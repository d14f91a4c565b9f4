"""`explain`: a model's plan at a degree and the reasons for it, without ranks or weights."""

import os
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from tpcompile import pipeline
from tpcompile.alternatives import Difference, forced, unpinned
from tpcompile.dims import Dim
from tpcompile.explain_text import full_text
from tpcompile.formulas import Symbols
from tpcompile.hardware import Hardware
from tpcompile.memory import Memory, Optimizer, activation_formula, memory_of, optimizer_for
from tpcompile.ops.replicated import reason_for
from tpcompile.passes.localize import layout_for
from tpcompile.pins import PlanLike, plan_options
from tpcompile.pipeline import OwnPasses
from tpcompile.plan import Plan, plan_of
from tpcompile.planning import Inputs, arguments_of, captured, check_rules
from tpcompile.predict import Times, predict
from tpcompile.problem import Assignment
from tpcompile.profiles import hardware_for
from tpcompile.program import Program
from tpcompile.reasons import parameter_reason
from tpcompile.traffic import Sent, counts_of, megatron_counts, traffic_of
from tpcompile.why import Reason, why


@dataclass(frozen=True)
class Row:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    style: str
    placement: str
    reason: str


@dataclass(frozen=True)
class Price:
    """What a pin of `plan=` costs."""

    pin: str
    extra: Difference
    """Of this plan over the cheapest one without the pin."""


class Explanation:
    """A plan and the reasons for it; `print` it, ask it `why`, or take its parts.

    Numbers are for the example's sizes; formulas hold for all.
    """

    def __init__(self, program: Program, optimizer: str | Optimizer = "adamw") -> None:
        """Of a program that `pipeline.plan` has planned and nothing has localised."""
        self.program, self.optimizer = program, optimizer_for(optimizer)
        self.size: int = program.extra["cost"].size
        self.hardware: Hardware = program.extra["cost"].hardware
        self._symbols = Symbols(program.extra["sizes"], self.size)
        self._plan: Assignment = program.extra["assignment"]

    @property
    def symbols(self) -> Symbols:
        """The symbols of all formulas, and their values in the example."""
        assert self.activation_formula is not None  # it has them all
        return self._symbols

    @cached_property
    def plan(self) -> Plan:
        """The plan, to be saved or given to `shard`."""
        layouts = {
            self.program.leaves[node.name].name: layout_for(
                node, state, self.program.extra["sizes"], self.size
            )
            for node, state in self._plan.parameters.items()
            if self.program.is_parameter(node)
        }
        return plan_of(self.program, layouts)

    @cached_property
    def parameters(self) -> tuple[Row, ...]:
        """Every parameter, with why it is placed so."""
        known = {self.program.leaves[n.name].name: n for n in self._plan.parameters}
        rows = []
        for p in self.plan.parameters:
            reason = parameter_reason(self.program, known[p.name], p.style)
            if p.name in self._plan.problem.pinned:
                reason = (
                    f"pinned by plan=; {reason}" if p.style != "replicated" else "pinned by plan="
                )
            rows.append(Row(p.name, p.shape, p.local, p.style, p.placement, reason))
        return tuple(rows)

    @cached_property
    def collectives(self) -> tuple[Sent, ...]:
        """Every collective, forward and backward, in graph order."""
        return tuple(traffic_of(self.program, self.symbols))

    @cached_property
    def memory(self) -> Memory:
        """Bytes on one device, and on the rank that has most."""
        return memory_of(self.program, self.optimizer)

    @cached_property
    def activation_formula(self) -> Any:
        """Bytes of saved activations on a rank, a sympy expression."""
        return activation_formula(self.program, self._symbols)

    @cached_property
    def times(self) -> Times:
        """Predicted seconds of a step."""
        return predict(self.program)

    @property
    def certificate(self) -> tuple[float, float]:
        """(seconds that the solver says the plan costs, seconds priced node by node)."""
        solver, graph = self.program.extra["certificate"]
        return solver * 1e-12, graph * 1e-12

    @property
    def phases(self) -> dict[str, float]:
        """CPU seconds of capture and of each pass."""
        return {
            "capture": self.program.extra["capture_seconds"],
            **{stage.name: stage.seconds for stage in self.program.extra["stages"]},
        }

    @property
    def blocks(self) -> tuple[str, ...]:
        """Paths of the repeated blocks."""
        return tuple(
            dict.fromkeys(n.meta["block"] for n in self.program.calls() if n.meta["block"])
        )

    @property
    def scattered(self) -> bool:
        """Whether the plan has sequence parallelism: ops outside of weights split over a stream."""
        weights = self._plan.choices.weights
        return any(
            s.split is not None and s.split not in weights for s in self._plan.strategies.values()
        )

    @cached_property
    def sequence_parallel(self) -> str:
        """Whether the plan has sequence parallelism, and if not, why."""
        if self.scattered:
            return "yes"
        if self.size == 1:
            return "no: there is one rank"
        if self.program.extra["sequence_parallel"] is False:
            return "no: sequence_parallel=False"
        return f"no: {_no_stream(self._plan)}"

    @cached_property
    def counts(self) -> Counter[tuple[str, str]]:
        """(direction, kind) -> collectives in the whole model."""
        return counts_of(self.collectives)

    @cached_property
    def megatron(self) -> dict[str, Counter[tuple[str, str]]]:
        """Block ("": the rest) -> collectives that Megatron-LM's recipe would have."""
        return megatron_counts(self.program, scattered=self.scattered)

    @cached_property
    def replicated(self) -> tuple[tuple[str, str, str], ...]:
        """(op, module path, reason) of every op that runs whole for want of a rule."""
        return tuple(
            (str(node.target), node.meta.get("path", ""), reason_for(node.target))
            for node in self._plan.strategies
            if node.meta.get("rule") is None
        )

    @cached_property
    def pins(self) -> tuple[Price, ...]:
        """The price of each pin: the difference to the cheapest plan without it."""
        problem = self._plan.problem
        by_text: dict[str, list[str]] = {}
        for name in problem.pinned:
            by_text.setdefault(problem.pins[name].text, []).append(name)
        return tuple(Price(text, unpinned(self._plan, names)) for text, names in by_text.items())

    def why(self, name: str) -> Reason:
        """Why a parameter, or an op or collective by its name in dumps, is what it is.

        Every alternative is priced by solving again with it, so on a large model this takes
        seconds.

        Raises:
            InputError: The plan has nothing of that name.
        """
        return why(self.program, name)

    def to_json(self) -> dict[str, Any]:
        """All of it as plain dicts, lists, numbers and texts."""
        return {
            **self.plan.to_json(),
            "sequence_parallel_used": self.sequence_parallel,
            "certificate": list(self.certificate),
            "phases": self.phases,
            "parameter_reasons": {row.name: row.reason for row in self.parameters},
            "traffic": [{**vars(s), "formula": str(s.formula)} for s in self.collectives],
            "memory": {
                **vars(self.memory),
                "total": self.memory.total,
                "single_total": self.memory.single_total,
            },
            "activation_formula": str(self.activation_formula),
            "times": {**vars(self.times), "step": self.times.step},
            "megatron": {
                b: {" ".join(k): n for k, n in c.items()} for b, c in self.megatron.items()
            },
            "pins": [{"pin": p.pin, **vars(p.extra)} for p in self.pins],
            "replicated": [list(each) for each in self.replicated],
        }

    def __str__(self) -> str:
        return full_text(self)

    def __repr__(self) -> str:
        return f"<Explanation of {len(self.plan.parameters)} parameters on {self.size} ranks>"


def explain(
    model: nn.Module,
    example_inputs: Inputs = None,
    *,
    tp: int,
    hardware: str | os.PathLike[str] | Hardware = "h100-nvlink",
    sequence_parallel: bool | str = "auto",
    outputs: str = "replicated",
    plan: PlanLike = None,
    optimizer: str | Optimizer = "adamw",
    strict: bool = False,
    passes: OwnPasses | None = None,
) -> Explanation:
    """What `shard` would do to `model` on `tp` ranks of `hardware`, and why.

    Needs no process group and no weights: a model on the meta device will do.

    Args:
        model: Is not changed.
        example_inputs: As for `shard`; they also give the sizes that bytes and seconds are for.
        tp: The degree.
        hardware: A profile, its name, or a file of one.
        sequence_parallel: As for `shard`.
        outputs: As for `shard`.
        plan: As for `shard`; the price of each pin is shown.
        optimizer: For the memory estimate: "none", "sgd", "sgd-momentum", "adam", "adamw", whose
            states have the parameters' dtype, or "adamw-mixed", Megatron-LM's with float32 copies.
        strict: Refuse ops without a rule.
        passes: As for `shard`.

    Raises:
        TpcompileError: As `shard` would.
    """
    policy, profile = optimizer_for(optimizer), hardware_for(hardware)
    args, kwargs = arguments_of(model, example_inputs)
    options = plan_options(model, plan, sequence_parallel, outputs, profile)
    program = captured(model, args, kwargs, passes=passes)
    pipeline.plan(program, tp, caches={}, **options)
    check_rules(program, strict=strict)
    return Explanation(program, policy)


def _no_stream(plan: Assignment) -> str:
    """Why no op splits a stream dim."""
    choices, tried = plan.choices, {}
    for node in plan.strategies:
        for dims in node.meta["dims"]:
            for dim in dims:
                for atom in choices.atoms.leaves(dim):
                    if atom.name.startswith("seq") and choices.unusable(atom):
                        tried[f"{atom.name}: {choices.unusable(atom)}"] = None
    if tried:
        return "; ".join(tried)
    for node, strategies in plan.problem.strategies.items():
        for i, strategy in enumerate(strategies):
            if isinstance(strategy.split, Dim) and strategy.split not in choices.weights:
                extra = forced(plan, node, i)
                if extra is not None:
                    return f"the cheapest plan with it: {extra}"
    return "no op of this model can be split by a dim that no weight has"


__all__ = ["Explanation", "explain"]
