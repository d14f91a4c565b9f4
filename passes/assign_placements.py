"""Choose, exactly, the cheapest placement of every parameter and op."""

import operator
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import fx

from tpcompile.cost import CostModel, bytes_of, ticks
from tpcompile.dims import Dim, ordered
from tpcompile.facts import facts_of
from tpcompile.layout import share
from tpcompile.placement import STAR, P, R, State, Value, conversion_ticks, normal
from tpcompile.program import Program, operands, values
from tpcompile.solver import Infeasible, solve
from tpcompile.strategies import Choices, Facts, Strategy

ValueKey = tuple[fx.Node, int]


@dataclass
class Assignment:
    """The chosen plan of one program."""

    strategies: dict[fx.Node, Strategy]
    """Of every call that is not pinned to replicated."""
    parameters: dict[fx.Node, State]
    """State of every parameter's storage."""
    delivered: dict[ValueKey, State]
    """The converted form the readers of a value may share, where it has several."""
    ticks: float
    """What the solver says the plan costs, picoseconds."""
    choices: Choices
    largest: int = 0


def assign_placements(program: Program) -> Program:
    """Set `program.extra["assignment"]` to the cheapest feasible plan.

    Before:  %h = linear(%x, %up)   %y = linear(%h, %down)
    After:   up S(ffn); %h split ffn, out S(ffn); down S(ffn); %y split ffn, out P

    One variable per parameter, per op that depends on one, and per value with several readers;
    costs are seconds of compute, of conversions and of resident bytes. Exact (see `solver`).
    """
    problem = _Problem(program)
    problem.build()
    try:
        solution = solve(problem.domains, problem.factors)
    except Infeasible as error:
        raise AssertionError(f"no placement is feasible: {error}") from error
    program.extra["assignment"] = problem.assignment(solution)
    return program


def value_of(node: fx.Node) -> ValueKey:
    """The value a node stands for: a getitem is its source's output."""
    if node.target is operator.getitem:
        return node.args[0], node.args[1]  # type: ignore[return-value]
    return node, 0


def readers_of(program: Program) -> dict[ValueKey, list[tuple[fx.Node, int]]]:
    """Value -> (call or output node, operand slot) of everything that reads it."""
    readers: dict[ValueKey, list[tuple[fx.Node, int]]] = defaultdict(list)
    for node in program.graph.nodes:
        if node.op == "placeholder" or node.target is operator.getitem:
            continue
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
        is_weight=node in facts.only_parameters and val.ndim >= 2,
        is_parameter=leaf is not None and leaf.kind == "parameter",
    )


def reader_trained(value: Value, reader: fx.Node, facts: Facts) -> bool:
    """Whether a gradient comes back from this reader (the output node counts as one)."""
    return value.trained and (reader.op == "output" or reader in facts.trained)


@dataclass
class _Problem:
    program: Program
    domains: list[int] = field(default_factory=list)
    factors: list[tuple[tuple[int, ...], np.ndarray]] = field(default_factory=list)

    def __post_init__(self) -> None:
        extra = self.program.extra
        self.cost: CostModel = extra["cost"]
        self.facts: Facts = extra.setdefault("facts", facts_of(self.program))
        self.choices = Choices(
            self.cost,
            extra["sizes"],
            self.facts,
            extra["batch"],
            extra["weights"],
            extra["width"],
            allow_stream=extra["sequence_parallel"] is not False,
        )
        self.pins: dict[str, Any] = extra.get("pins", {})
        self.variable: dict[fx.Node, int] = {}
        self.strategies: dict[fx.Node, list[Strategy]] = {}
        self.states: dict[fx.Node, list[State]] = {}
        self.deliveries: dict[ValueKey, tuple[int, list[State]]] = {}
        self._tables: dict[Any, np.ndarray] = {}

    def build(self) -> None:
        """Make all variables and factors."""
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self._add_leaf(node)
            elif node.op == "call_function" and node.target is not operator.getitem:
                depends = node in self.facts.from_parameters or node in self.facts.trained
                if depends and values(node):
                    self._add_op(node)
        for key, readers in readers_of(self.program).items():
            if key[0] in self.variable:
                self._connect(key, readers)

    def _variable(self, node: fx.Node, prices: list[float]) -> None:
        self.variable[node] = len(self.domains)
        self.domains.append(len(prices))
        self.factors.append(((self.variable[node],), np.array(prices)))

    def _add_leaf(self, node: fx.Node) -> None:
        kind = self.program.leaves[node.name].kind
        if kind == "parameter":
            self.states[node] = self._parameter_states(node)
            self._variable(node, [self._resident(node, s) for s in self.states[node]])
        elif node in self.facts.trained:
            self.states[node] = [R]
            self._variable(node, [0.0])

    def _parameter_states(self, node: fx.Node) -> list[State]:
        pinned = self.pins.get(self.program.leaves[node.name].name)
        if pinned is not None:
            return [pinned(node, self.choices)]
        atoms, usable = self.choices.atoms, self.choices.unusable
        dims = node.meta["dims"][0]
        ways = [atoms.splitting(d) for d in dims]
        once = [
            atom
            for i, way in enumerate(ways)
            for atom in ordered(way)
            if not any(atom in atoms.leaves(d) for j, d in enumerate(dims) if j != i)
        ]
        return [R, *(a for a in once if not usable(a) and a in self.choices.weights)]

    def _resident(self, node: fx.Node, state: State) -> float:
        return resident_ticks(node, state, self.choices)

    def _add_op(self, node: fx.Node) -> None:
        pinned = [value_of(n)[0] not in self.variable for n in operands(node)]
        self.strategies[node] = [
            s
            for s in self.choices.strategies(node)
            # A value that depends on no parameter is whole on every rank, never a partial sum.
            if not any(p and need == P for p, need in zip(pinned, s.ins, strict=True))
        ]
        self._variable(node, [s.ticks for s in self.strategies[node]])

    def _connect(self, key: ValueKey, readers: list[tuple[fx.Node, int]]) -> None:
        node, index = key
        value = describe(key, self.facts, self.program)
        have = (
            [s.outs[index] for s in self.strategies[node]]
            if node in self.strategies
            else self.states[node]
        )
        needs = [self._needs(reader, slot) for reader, slot in readers]
        flags = [reader_trained(value, reader, self.facts) for reader, _ in readers]
        if len(readers) > 1 and self._worth_sharing(have, needs):
            self._deliver(key, value, have, readers, needs, flags)
            return
        for (reader, _), need, flag in zip(readers, needs, flags, strict=True):
            self._add((node, reader), self._table(key, value, flag, have, need))

    def _needs(self, reader: fx.Node, slot: int) -> list[State]:
        if reader in self.strategies:
            return [s.ins[slot] for s in self.strategies[reader]]
        return [R]

    def _worth_sharing(self, have: list[State], needs: list[list[State]]) -> bool:
        """Whether two readers could need one form that differs from what there is."""
        other = [{s for s in need if len(have) > 1 or s != have[0]} for need in needs]
        seen: set[State] = set()
        for states in other:
            if seen & states:
                return True
            seen |= states
        return False

    def _deliver(
        self,
        key: ValueKey,
        value: Value,
        have: list[State],
        readers: list[tuple[fx.Node, int]],
        needs: list[list[State]],
        flags: list[bool],
    ) -> None:
        counts: dict[State, int] = defaultdict(int)
        for need in needs:
            for state in dict.fromkeys(need):
                counts[state] += 1
        forms = [s for s, n in counts.items() if n > 1 and s != P]
        delivery = len(self.domains)
        self.domains.append(len(forms) + 1)
        self.deliveries[key] = (delivery, forms)
        node = key[0]
        # The last form means: nothing shared, every reader converts what there is.
        to_form = self._table(key, value, any(flags), have, forms)
        first = np.hstack([to_form, np.zeros((len(have), 1))])
        self._add_raw((self.variable[node], delivery), first)
        for (reader, _), need, flag in zip(readers, needs, flags, strict=True):
            direct = self._table(key, value, flag, have, need)
            shared = self._table(key, value, flag, forms, need)
            shared = np.vstack([shared, np.full((1, len(need)), np.inf)])
            table = np.minimum(direct[:, None, :], shared[None, :, :])
            if reader in self.variable:
                self._add_raw((self.variable[node], delivery, self.variable[reader]), table)
            else:
                self._add_raw((self.variable[node], delivery), table[:, :, 0])

    def _table(
        self, key: ValueKey, value: Value, flag: bool, have: list[State], need: list[State]
    ) -> np.ndarray:
        """Conversion costs by (have, need); equal tables of equal values are made once."""
        value = replace(value, trained=flag)
        dims = key[0].meta["dims"][key[1]]
        local: dict[State, tuple[int, int]] = {}
        for state in (*have, *need):
            if isinstance(state, Dim) and state not in local:
                local[state] = (len(local), self._place(dims, state))
        code = tuple(local.get(s, s) for s in have), tuple(local.get(s, s) for s in need)
        if (value, code) not in self._tables:
            self._tables[value, code] = np.array(
                [
                    [
                        # Both in one dim: neither is a plain part of the other's piece.
                        np.inf
                        if h in local and n in local and h is not n and local[h][1] == local[n][1]
                        else conversion_ticks(value, h, n, self.cost)
                        for n in need
                    ]
                    for h in have
                ]
            ).reshape(len(have), len(need))
        return self._tables[value, code]

    def _place(self, dims: tuple[Any, ...], atom: Dim) -> int:
        leaves = self.choices.atoms.leaves
        return next(i for i, dim in enumerate(dims) if atom in leaves(dim))

    def _add(self, nodes: tuple[fx.Node, fx.Node], table: np.ndarray) -> None:
        source, reader = nodes
        if reader not in self.variable:
            self._add_raw((self.variable[source],), table[:, 0])
        else:
            self._add_raw((self.variable[source], self.variable[reader]), table)

    def _add_raw(self, scope: tuple[int, ...], table: np.ndarray) -> None:
        self.factors.append((scope, table))

    def assignment(self, solution: Any) -> Assignment:
        """The plan a solution of the problem stands for."""
        chosen = {n: s[solution.choice[self.variable[n]]] for n, s in self.strategies.items()}
        states = {n: s[solution.choice[self.variable[n]]] for n, s in self.states.items()}
        delivered = {}
        for key, (variable, forms) in self.deliveries.items():
            pick = solution.choice[variable]
            if pick < len(forms):
                delivered[key] = forms[pick]
        return Assignment(
            chosen, states, delivered, solution.cost, self.choices, solution.largest
        )


def resident_ticks(node: fx.Node, state: State, choices: Choices) -> float:
    """Picoseconds that a parameter's local bytes are worth."""
    val = node.meta["val"]
    nbytes: float = bytes_of(val)
    if isinstance(state, Dim):
        units = choices.hint(state)
        nbytes *= share(units, choices.cost.size, 0) / units
    return ticks(choices.cost.resident(nbytes, val.ndim, node in choices.facts.trained))


def delivered_path(
    value: Value, have: State, shared: State | None, need: State, cost: CostModel
) -> tuple[State, ...]:
    """States on the cheapest way to a reader: directly, or through the shared form."""
    if shared is None:
        return (need,)
    direct = conversion_ticks(value, have, need, cost)
    through = conversion_ticks(value, shared, need, cost)
    return (need,) if direct <= through and shared != need else (shared, need)


__all__ = [
    "STAR", "Assignment", "assign_placements", "delivered_path", "describe", "normal",
    "reader_trained", "readers_of", "value_of",
]
