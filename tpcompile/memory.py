"""Bytes that training a planned program takes on one rank, activations included."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx

from tpcompile.cost import CostModel, hint
from tpcompile.dims import Dim
from tpcompile.errors import InputError
from tpcompile.formulas import Symbols, T
from tpcompile.layout import share
from tpcompile.program import Program
from tpcompile.saved import Keeper, Saved


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer keeps for every element of a trained parameter."""

    name: str
    states: tuple[torch.dtype | None, ...]
    """Dtype of each value it keeps; None: the parameter's."""
    gradient: torch.dtype | None = None
    """Dtype in which gradients are held; None: the parameter's."""


_SINGLE = torch.float32
OPTIMIZERS: dict[str, Optimizer] = {
    each.name: each
    for each in (
        Optimizer("none", ()),
        Optimizer("sgd", ()),
        Optimizer("sgd-momentum", (None,)),
        Optimizer("adam", (None, None)),
        Optimizer("adamw", (None, None)),
        # Megatron-LM's: a float32 copy of the weights, float32 moments, float32 gradients.
        Optimizer("adamw-mixed", (_SINGLE, _SINGLE, _SINGLE), _SINGLE),
    )
}
"""By name. torch's optimizers keep their state in the parameters' dtype; "none" is inference."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one device alone, and of the rank that holds most."""

    size: int
    optimizer: str
    single: Mapping[str, int]
    """Kind (weights, gradients, optimizer, activations, buffers) -> bytes on one device."""
    rank: Mapping[str, int]
    by_block: Mapping[str, int] = field(default_factory=dict)
    """Block -> bytes of activations that it keeps on a rank; "" is the rest of the model."""

    @property
    def total(self) -> int:
        """Bytes of the rank."""
        return sum(self.rank.values())

    @property
    def single_total(self) -> int:
        """Bytes of one device that runs the whole model."""
        return sum(self.single.values())


def optimizer_for(name: str | Optimizer) -> Optimizer:
    """The optimizer of a name.

    Raises:
        InputError: The name is not known.
    """
    if isinstance(name, Optimizer):
        return name
    if name not in OPTIMIZERS:
        raise InputError(
            f"optimizer={name!r} for a memory estimate.",
            "no optimizer is known by that name.",
            f"use one of {', '.join(OPTIMIZERS)}, or a tpcompile.memory.Optimizer",
        )
    return OPTIMIZERS[name]


def memory_of(
    program: Program, optimizer: str | Optimizer = "adamw", *, device: str = "cuda"
) -> Memory:
    """What training a program that `pipeline.plan` has planned takes, at the example's sizes.

    Activations are what autograd keeps, each tensor once; no temporary buffers, no allocator's
    waste. `device` matters for dropout masks only.
    """
    policy = optimizer_for(optimizer)
    cost: CostModel = program.extra["cost"]
    single: dict[str, int] = dict.fromkeys(
        ("weights", "gradients", "optimizer", "activations", "buffers"), 0
    )
    rank = dict(single)
    for node in program.placeholders():
        kind = program.leaves[node.name].kind
        if kind == "parameter":
            _add_parameter(single, node, 1.0, policy)
            _add_parameter(rank, node, _fraction(program, node), policy)
        elif kind in ("buffer", "constant"):
            for table in (single, rank):
                table["buffers"] += _numel(node) * node.meta["val"].dtype.itemsize
    by_block: dict[str, int] = defaultdict(int)
    if policy.name != "none":
        whole = Keeper(program, device=device, whole=True).run()
        single["activations"] = sum(s.local_bytes(1) for s in whole.values())
        for saved in saved_on_rank(program, device=device):
            by_block[saved.by.meta.get("block", "")] += saved.local_bytes(cost.size)
        rank["activations"] = sum(by_block.values())
    return Memory(cost.size, policy.name, single, rank, dict(by_block))


def saved_on_rank(program: Program, *, device: str = "cuda") -> list[Saved]:
    """Every tensor that autograd keeps on a rank."""
    return list(Keeper(program, device=device).run().values())


def activation_formula(program: Program, symbols: Symbols, *, device: str = "cuda") -> Any:
    """Bytes of saved activations on a rank, a sympy expression in the program's symbols and t."""
    total: dict[Any, int] = defaultdict(int)
    for saved in saved_on_rank(program, device=device):
        part = T if isinstance(saved.state, Dim) else 1
        total[symbols.size(saved.dims) / part] += saved.itemsize
    return sum((term * nbytes for term, nbytes in total.items()), start=0 * T)


def _fraction(program: Program, node: fx.Node) -> float:
    plan = program.extra["assignment"]
    state = plan.parameters.get(node)
    if not isinstance(state, Dim):
        return 1.0
    units = plan.choices.hint(state)
    return share(units, plan.choices.cost.size, 0) / units


def _numel(node: fx.Node) -> int:
    return prod(map(hint, node.meta["val"].shape))


def _add_parameter(
    table: dict[str, int], node: fx.Node, fraction: float, policy: Optimizer
) -> None:
    own = node.meta["val"].dtype
    count = round(_numel(node) * fraction)
    table["weights"] += count * own.itemsize
    if node.meta["val"].requires_grad and policy.name != "none":
        table["gradients"] += count * (policy.gradient or own).itemsize
        table["optimizer"] += count * sum((each or own).itemsize for each in policy.states)
