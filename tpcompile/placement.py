"""Placement states of a value on the mesh axis, and what it takes to go from one to another."""

from dataclasses import dataclass

from tpcompile.cost import CostModel, ticks
from tpcompile.dims import Dim, text_of

R = "R"
"""Replicated, gradient replicated."""
STAR = "R*"
"""Replicated, gradient a partial sum."""
P = "P"
"""Partial sum, gradient replicated."""
State = str | Dim
"""`R`, `R*`, `P`, or the named dim that is split."""

INFINITE = float("inf")


def state_text(state: State) -> str:
    """`R`, `R*`, `P` or `S(ffn)`."""
    return f"S({text_of(state)})" if isinstance(state, Dim) else state


@dataclass(frozen=True)
class Step:
    """One conversion: the function of `collectives` and what it sends in each direction."""

    function: str
    forward: str = ""
    """Collective in the forward pass, "" for none."""
    backward: str = ""
    partial_grad: bool = False
    """all_gather and split: the gradient of the replicated side is a partial sum."""


COPY = Step("copy", "", "all_reduce")
ALL_REDUCE = Step("all_reduce", "all_reduce", "")
REDUCE_SCATTER = Step("reduce_scatter", "reduce_scatter", "all_gather")
GATHER_STAR = Step("all_gather", "all_gather", "reduce_scatter", partial_grad=True)
GATHER = Step("all_gather", "all_gather", "")
SPLIT = Step("split", "", "all_gather")
SPLIT_STAR = Step("split", "", "", partial_grad=True)
ALL_TO_ALL = Step("all_to_all", "all_to_all", "all_to_all")

PAD = Step("pad")
TO_PARTIAL = Step("to_partial")
TO_PARTIAL_STAR = Step("to_partial", partial_grad=True)

_KIND = {R: "R", STAR: "R*", P: "P"}
_STEPS: dict[tuple[str, str], tuple[Step, ...]] = {
    ("R", "R*"): (COPY,),
    ("R", "S"): (SPLIT,),
    ("R*", "S"): (SPLIT_STAR,),
    ("R", "P"): (TO_PARTIAL,),
    ("R*", "P"): (TO_PARTIAL_STAR,),
    ("P", "R"): (ALL_REDUCE,),
    ("P", "R*"): (ALL_REDUCE, COPY),
    ("P", "S"): (REDUCE_SCATTER,),
    ("S", "P"): (PAD,),
    ("S", "R"): (GATHER,),
    ("S", "R*"): (GATHER_STAR,),
}


def steps_between(have: State, need: State) -> tuple[Step, ...] | None:
    """The conversions from one state to another, () when equal, None when there is no way."""
    if have is need or have == need:
        return ()
    pair = (_KIND.get(have, "S"), _KIND.get(need, "S"))  # type: ignore[arg-type]
    return (ALL_TO_ALL,) if pair == ("S", "S") else _STEPS.get(pair)


@dataclass(frozen=True)
class Value:
    """What pricing a conversion needs to know of a value."""

    nbytes: int
    trained: bool
    """Whether a gradient flows back through it."""
    is_weight: bool
    """A parameter, or computed from parameters alone: never gathered at run time."""
    is_parameter: bool = False


def normal(state: State, trained: bool) -> State:
    """The state, with R* read as R where there is no gradient."""
    return R if state == STAR and not trained else state


def conversion_ticks(value: Value, have: State, need: State, cost: CostModel) -> float:
    """Picoseconds, forward and backward, of bringing a value from one state to another."""
    steps = steps_between(normal(have, value.trained), normal(need, value.trained))
    if steps is None:
        return INFINITE
    if not steps:
        return 0.0
    if value.is_weight and any(s is PAD or s.forward not in ("", "all_reduce") for s in steps):
        return INFINITE
    return sum(step_ticks(value, step, cost) for step in steps)


def step_ticks(value: Value, step: Step, cost: CostModel) -> float:
    """Picoseconds of one conversion node."""
    total = cost.collective(step.forward, value.nbytes) if step.forward else 0.0
    if step is PAD:
        total += value.nbytes / cost.hardware.memory_bandwidth
    if value.trained and step.backward:
        bucket = value.is_parameter and step is COPY
        total += (
            cost.bucketed(value.nbytes) if bucket else cost.collective(step.backward, value.nbytes)
        )
    return ticks(total)
