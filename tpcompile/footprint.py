"""Bytes of memory one rank of a planned program needs, as a function of the sequence length."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from tpcompile.dims import Dim
from tpcompile.layout import share
from tpcompile.placement import R, State
from tpcompile.problem import Assignment
from tpcompile.program import Program, operands, values
from tpcompile.readers import value_of
from tpcompile.work import is_view

_SAVES_NOTHING = (
    "aten.add", "aten.sub", "aten.neg", "aten._to_copy", "aten.to", "aten.mean", "aten.sum",
    "aten.embedding", "aten.clone", "aten.contiguous", "aten.cat", "aten.stack", "aten.detach",
)  # fmt: skip
_SAVES_OUTPUT = (
    "aten.softmax", "aten._softmax", "aten.log_softmax", "aten.sigmoid", "aten.tanh", "aten.exp",
    "aten.rsqrt", "aten.sqrt", "aten.relu", "aten.reciprocal",
)  # fmt: skip
_HALF = (torch.bfloat16, torch.float16)

STATES: Mapping[str, int] = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""Tensors an optimizer keeps per parameter."""


@dataclass(frozen=True)
class Growing:
    """Bytes that grow with the sequence: a sum of (bytes, sizes they are multiplied by)."""

    terms: tuple[tuple[tuple[Any, ...], float], ...]

    def at(self, sizes: Mapping[Any, int]) -> float:
        """Bytes where each symbol has this size."""
        return sum(
            nbytes * prod(float(expr.subs(sizes)) for expr in exprs) for exprs, nbytes in self.terms
        )


@dataclass(frozen=True)
class Footprint:
    """Bytes on one rank; `block_` is the part of the repeated blocks together."""

    weights: float
    gradients: float
    optimizer: float
    block_state: float
    """Of weights, gradients and optimizer state."""
    activations: Growing
    """What the backward pass keeps."""
    block_activations: Growing
    block_inputs: float
    """What activation checkpointing keeps of all blocks, at the example sequence."""

    @property
    def state(self) -> float:
        """Weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer


def footprint_of(program: Program, optimizer: str, master_weights: bool) -> Footprint:
    """The memory of one rank under the plan of `program`.

    With `master_weights` half-precision parameters have float32 gradients, a float32 copy and
    float32 optimizer state (18 bytes a parameter for Adam, Rajbhandari et al. 2020, section 3.1,
    and float32 gradients); without, everything has the parameter's dtype.
    """
    plan: Assignment = program.extra["assignment"]
    blocks: set[str] = program.extra.get("block_paths", set())
    weights = gradients = state = in_blocks = 0.0
    for node, where in plan.parameters.items():
        leaf, val = program.leaves[node.name], node.meta["val"]
        if leaf.kind != "parameter":
            continue
        count = val.numel() * _fraction(where, plan)
        mixed = master_weights and val.dtype in _HALF
        own = [count * val.dtype.itemsize, 0.0, 0.0]
        if node in plan.choices.facts.trained:
            wide = 4 if mixed else val.dtype.itemsize
            own[1:] = count * wide, count * (4 * mixed + wide * STATES[optimizer])
        weights, gradients, state = weights + own[0], gradients + own[1], state + own[2]
        in_blocks += sum(own) if any(leaf.name.startswith(b + ".") for b in blocks) else 0.0
    everything, inside, entering = _saved(program, plan)
    return Footprint(weights, gradients, state, in_blocks, everything, inside, entering)


def _fraction(state: State, plan: Assignment) -> float:
    if not isinstance(state, Dim):
        return 1.0
    units = plan.choices.hint(state)
    return share(units, plan.choices.cost.size, 0) / units


def _saved(program: Program, plan: Assignment) -> tuple[Growing, Growing, float]:
    """(all activations, those of blocks, bytes of the inputs of all blocks)."""
    facts = plan.choices.facts
    terms: dict[bool, dict[tuple[Any, ...], float]] = {
        True: defaultdict(float), False: defaultdict(float)
    }  # fmt: skip
    counted: set[tuple[fx.Node, int]] = set()
    entering: dict[str, float] = {}
    for node in program.calls():
        if node not in facts.trained or "conversion" in node.meta or "rule" not in node.meta:
            continue
        block = node.meta.get("block", "")
        for key in map(_base, _kept_by(node, facts.trained)):
            if key in counted or key[0] in facts.only_parameters or key[0].op == "placeholder":
                continue
            counted.add(key)
            exprs, nbytes = _local_bytes(key, plan)
            terms[bool(block)][exprs] += nbytes
            if block and key[0].meta.get("block", "") != block:
                entering.setdefault(block, _at_hint(key, plan))
    inside = Growing(tuple(terms[True].items()))
    both = Growing((*terms[True].items(), *terms[False].items()))
    return both, inside, sum(entering.values())


def _kept_by(node: fx.Node, trained: set[fx.Node]) -> list[tuple[fx.Node, int]]:
    """Values that a call keeps for its backward pass."""
    name = str(node.target)
    if name.startswith(_SAVES_NOTHING) or is_view(node):
        return []
    if name.startswith(_SAVES_OUTPUT):
        return [(node, 0)]
    inputs = [n for n in operands(node) if n.meta["val"].is_floating_point()]
    if name.startswith(("aten.mul", "aten.div")):
        inputs = [
            n for i, n in enumerate(inputs) if any(o in trained for o in inputs[:i] + inputs[i + 1 :])
        ]
    kept = [value_of(n) for n in inputs]
    if "attention" in name or "dropout" in name:
        kept.append((node, 0))
    return kept


def _base(key: tuple[fx.Node, int]) -> tuple[fx.Node, int]:
    """The value whose memory this one shows."""
    node = key[0]
    while node.op == "call_function":
        what = node.meta.get("conversion")
        same = what.step.function in ("copy", "copy_many") if what else is_view(node)
        if not same:
            break
        key = value_of(operands(node)[0])
        node = key[0]
    return key


def _local_bytes(
    key: tuple[fx.Node, int], plan: Assignment
) -> tuple[tuple[Any, ...], float]:
    """(symbolic sizes, bytes for each unit of them) of a rank's part of a value."""
    node, index = key
    val = values(node)[index]
    exprs = tuple(s.node.expr for s in val.shape if not isinstance(s, int))
    fixed = prod(s for s in val.shape if isinstance(s, int))
    return exprs, fixed * val.dtype.itemsize * _fraction(_state(key, plan), plan)


def _state(key: tuple[fx.Node, int], plan: Assignment) -> State:
    node, index = key
    if "conversion" in node.meta:
        return node.meta["conversion"].need
    strategy = plan.strategies.get(node)
    return strategy.outs[index] if strategy is not None else plan.parameters.get(node, R)


def _at_hint(key: tuple[fx.Node, int], plan: Assignment) -> float:
    exprs, nbytes = _local_bytes(key, plan)
    sizes = plan.choices.sizes.hints
    return nbytes * prod(float(e.subs(sizes)) for e in exprs)
