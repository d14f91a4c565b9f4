"""Who reads each value of a program, and what pricing its conversions needs to know of it."""

import operator
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import fx

from tpcompile.cost import CostModel, bytes_of
from tpcompile.dims import Dim, MaybeDim, contains
from tpcompile.placement import State, Value, conversion_ticks
from tpcompile.program import Program, operands, values
from tpcompile.strategies import Facts

ValueKey = tuple[fx.Node, int]
"""(call or placeholder, number of its output)."""


def value_of(node: fx.Node) -> ValueKey:
    """The value a node stands for: a getitem is its source's output."""
    if node.target is operator.getitem:
        return node.args[0], node.args[1]  # type: ignore[return-value]
    return node, 0


def user_outputs(program: Program) -> list[fx.Node]:
    """What the forward returns, tensors only and in order; new values of buffers are not in it."""
    (returned,) = program.output().args
    given = returned[: program.n_outputs]  # type: ignore[index]
    return [n for n in given if isinstance(n, fx.Node) and values(n)]  # type: ignore[union-attr]


def readers_of(program: Program) -> dict[ValueKey, list[tuple[fx.Node, int]]]:
    """Value -> (call or output node, operand slot) of everything that reads it."""
    readers: dict[ValueKey, list[tuple[fx.Node, int]]] = defaultdict(list)
    for node in program.graph.nodes:
        if node.op == "placeholder" or node.target is operator.getitem:
            continue
        if node.target is torch.ops.aten.sym_size.int and operands(node)[0].op == "placeholder":
            continue  # only sizes that vary are read so, and those of an input are never split
        for slot, source in enumerate(operands(node)):
            readers[value_of(source)].append((node, slot))
    return readers


def describe(key: ValueKey, facts: Facts, program: Program) -> Value:
    """What pricing needs to know of a value."""
    node, index = key
    val = values(node)[index]
    floating = val.is_floating_point() or val.is_complex()
    leaf = program.leaves.get(node.name) if node.op == "placeholder" else None
    return Value(
        nbytes=bytes_of(val),
        trained=node in facts.trained and floating,
        is_weight=node in facts.only_parameters,
        is_parameter=leaf is not None and leaf.kind == "parameter",
    )


def reader_trained(value: Value, reader: fx.Node, facts: Facts) -> bool:
    """Whether a gradient comes back from this reader (the output node counts as one)."""
    return value.trained and (reader.op == "output" or reader in facts.trained)


def ticks_between(
    value: Value, dims: tuple[MaybeDim, ...], have: State, need: State, cost: CostModel
) -> float:
    """Picoseconds of one conversion of a value with these dims; inf between parts of one dim.

    Neither is a plain part of the other's piece.
    """
    if isinstance(have, Dim) and isinstance(need, Dim) and have is not need:
        for dim in dims:
            if dim is not None and contains(dim, have) and contains(dim, need):
                return float("inf")
    return conversion_ticks(value, have, need, cost)


@dataclass(frozen=True)
class Delivery:
    """What it takes to bring one value to a reader."""

    value: Value
    dims: tuple[MaybeDim, ...]
    """Of the value."""
    have: State
    shared: State | None
    """The form that several readers share, if there is one."""
    cost: CostModel

    def ticks(self, have: State, need: State) -> float:
        """Picoseconds of one conversion of the value."""
        return ticks_between(self.value, self.dims, have, need, self.cost)

    def total(self, need: State) -> float:
        """Picoseconds of the cheapest way to a state."""
        direct = self.ticks(self.have, need)
        return direct if self.shared is None else min(direct, self.ticks(self.shared, need))


def delivered_path(delivery: Delivery, need: State) -> tuple[State, ...]:
    """States on the cheapest way to a reader: directly, or through the shared form."""
    shared = delivery.shared
    if shared is None:
        return (need,)
    direct, through = delivery.ticks(delivery.have, need), delivery.ticks(shared, need)
    return (need,) if direct <= through and shared != need else (shared, need)
