"""The choice of placements as a problem for the solver: a variable a decision, a table a cost."""

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import fx

from tpcompile.attention import avoidable
from tpcompile.cache_plan import cache_plan
from tpcompile.cost import CostModel
from tpcompile.dims import Dim, ordered
from tpcompile.placement import P, R, State, Value
from tpcompile.program import Program, operands, values
from tpcompile.readers import (
    ValueKey,
    describe,
    reader_trained,
    readers_of,
    ticks_between,
    user_outputs,
    value_of,
)
from tpcompile.relaxation import solve_or_relax
from tpcompile.solver import Factor, Solution
from tpcompile.strategies import Choices, Facts, Strategy


@dataclass(frozen=True)
class Pin:
    """What a user asks of one parameter."""

    text: str
    """As the user wrote it: `'*.up.weight' as Shard(0)`."""
    splits: bool
    """Whether it asks for a part on each rank."""
    keep: Callable[[fx.Node, list[State], Choices], list[State]]
    """(parameter, its states, choices) -> the states that remain, at least one."""


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
    problem: "Problem"
    """What was solved, to be solved again with something forbidden."""
    largest: int = 0

    @property
    def choices(self) -> Choices:
        """What each op could have done."""
        return self.problem.choices


@dataclass
class Problem:
    """Domains and cost tables of one program; `solve` may be asked again with other pins."""

    program: Program
    domains: list[int] = field(default_factory=list)
    factors: list[tuple[tuple[int, ...], np.ndarray]] = field(default_factory=list)

    def __post_init__(self) -> None:
        extra = self.program.extra
        self.cost: CostModel = extra["cost"]
        self.facts: Facts = extra["facts"]
        self.choices = Choices(
            self.cost,
            extra["sizes"],
            self.facts,
            extra["batch"],
            extra["weights"],
            frozenset(extra["widths"]),
            allow_stream=extra["sequence_parallel"] is not False,
            atoms=extra["atoms"],
        )
        self._n_outputs = len(user_outputs(self.program))
        self.caches = cache_plan(self.program, self.choices)
        self.pins: dict[str, Pin] = extra.get("pins", {})
        leaves = self.program.leaves
        self.choices.pinned = {
            n for n in self.program.placeholders("parameter") if leaves[n.name].name in self.pins
        }
        self.choices.inner = avoidable(self.program.calls(), self.choices)
        self.variable: dict[fx.Node, int] = {}
        self.strategies: dict[fx.Node, list[Strategy]] = {}
        self.states: dict[fx.Node, list[State]] = {}
        self.deliveries: dict[ValueKey, tuple[int, list[State]]] = {}
        self._tables: dict[Any, np.ndarray] = {}
        self.pinned: dict[str, Factor] = {}
        """Parameter name -> the table that forbids the states its pin does not keep."""
        self._build()

    def kept(self, name: str) -> list[State]:
        """The states that the pin of a parameter keeps."""
        (variable,), mask = self.pinned[name]
        node = next(n for n in self.states if self.variable[n] == variable)
        return [s for s, price in zip(self.states[node], mask, strict=True) if price == 0]

    def _build(self) -> None:
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
            states = self.states[node] = self._parameter_states(node)
            self._variable(node, [self.choices.resident_ticks(node, s) for s in states])
            self._pin(node, states)
        elif node in self.caches.inputs:
            dims = node.meta["dims"][0]
            states = self.states[node] = self.caches.states(dims, self.caches.inputs[node])
            self._variable(node, self.caches.prices(states))
        elif node in self.facts.trained:
            self.states[node] = [R]
            self._variable(node, [0.0])

    def _pin(self, node: fx.Node, states: list[State]) -> None:
        name = self.program.leaves[node.name].name
        if name in self.pins:
            kept = self.pins[name].keep(node, states, self.choices)
            mask = np.array([0.0 if s in kept else np.inf for s in states])
            self.pinned[name] = ((self.variable[node],), mask)

    def _parameter_states(self, node: fx.Node) -> list[State]:
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

    def _add_op(self, node: fx.Node) -> None:
        self.strategies[node] = self.choices.strategies(node)
        self._variable(node, [s.ticks for s in self.strategies[node]])

    def _connect(self, key: ValueKey, readers: list[tuple[fx.Node, int]]) -> None:
        node, index = key
        value = describe(key, self.facts, self.program)
        have = (
            [s.outs[index] for s in self.strategies[node]]
            if node in self.strategies
            else self.states[node]
        )
        needs = [self.needs(reader, slot) for reader, slot in readers]
        flags = [reader_trained(value, reader, self.facts) for reader, _ in readers]
        if len(readers) > 1 and self._worth_sharing(have, needs):
            self._deliver(key, value, have, readers, needs, flags)
            return
        for (reader, slot), need, flag in zip(readers, needs, flags, strict=True):
            decider = self.decider(reader, slot)
            self._add((node, decider), self._table(key, value, flag, have, need))

    def needs(self, reader: fx.Node, slot: int) -> list[State]:
        """The states in which an operand may arrive, one for each strategy of its reader.

        The output has no strategies: its operands may arrive in any of theirs.
        """
        if reader in self.strategies:
            return [s.ins[slot] for s in self.strategies[reader]]
        if reader.op != "output":
            return [R]
        decider = self.decider(reader, slot)
        if decider is not reader:
            return self.states[decider]
        node, index = value_of(operands(reader)[slot])
        dims = node.meta["dims"][index]
        if slot in self.caches.outputs:
            return self.caches.states(dims, self.caches.outputs[slot])
        sharded = self.program.extra["outputs"] == "sharded" and slot < self._n_outputs
        return self.choices.output_states(dims) if sharded else [R]

    def decider(self, reader: fx.Node, slot: int) -> fx.Node:
        """The node whose strategy, or state, says how an operand of `reader` has to arrive."""
        source = self.caches.source_for(slot) if reader.op == "output" else None
        return source or reader

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
        for (reader, slot), need, flag in zip(readers, needs, flags, strict=True):
            decider = self.decider(reader, slot)
            direct = self._table(key, value, flag, have, need)
            shared = self._table(key, value, flag, forms, need)
            shared = np.vstack([shared, np.full((1, len(need)), np.inf)])
            table = np.minimum(direct[:, None, :], shared[None, :, :])
            if decider in self.variable:
                self._add_raw((self.variable[node], delivery, self.variable[decider]), table)
            else:
                self._add_raw((self.variable[node], delivery), table.min(axis=2))

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
                [[ticks_between(value, dims, h, n, self.cost) for n in need] for h in have]
            ).reshape(len(have), len(need))
        return self._tables[value, code]

    def _place(self, dims: tuple[Any, ...], atom: Dim) -> int:
        leaves = self.choices.atoms.leaves
        return next(i for i, dim in enumerate(dims) if atom in leaves(dim))

    def _add(self, nodes: tuple[fx.Node, fx.Node], table: np.ndarray) -> None:
        source, reader = nodes
        if reader not in self.variable:
            self._add_raw((self.variable[source],), table.min(axis=1))
        else:
            self._add_raw((self.variable[source], self.variable[reader]), table)

    def _add_raw(self, scope: tuple[int, ...], table: np.ndarray) -> None:
        self.factors.append((scope, table))

    def solve(self, without: Collection[str] = (), extra: Sequence[Factor] = ()) -> Solution:
        """The cheapest choice: under all pins but those of `without`, and under `extra` tables.

        Raises:
            Infeasible: Every choice is forbidden.
        """
        pins = [factor for name, factor in self.pinned.items() if name not in without]
        return solve_or_relax(self.domains, [*self.factors, *pins, *extra])

    def assignment(self, solution: Solution) -> Assignment:
        """The plan a solution of the problem stands for."""
        chosen = {n: s[solution.choice[self.variable[n]]] for n, s in self.strategies.items()}
        states = {n: s[solution.choice[self.variable[n]]] for n, s in self.states.items()}
        delivered = {}
        for key, (variable, forms) in self.deliveries.items():
            pick = solution.choice[variable]
            if pick < len(forms):
                delivered[key] = forms[pick]
        return Assignment(chosen, states, delivered, solution.cost, self, solution.largest)
