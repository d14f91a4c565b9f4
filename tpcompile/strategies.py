"""What each op may do: replicate, pass partial sums or partial gradients through, split a dim."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import fx

from tpcompile.cost import CostModel, bytes_of, ticks
from tpcompile.dims import Atoms, Dim, MaybeDim, ordered, segments_of
from tpcompile.layout import share
from tpcompile.placement import STAR, P, R, State
from tpcompile.program import operands, values
from tpcompile.rule import DimSpec, Rule
from tpcompile.sizes import Sizes
from tpcompile.units import has_sum_beyond
from tpcompile.work import Work

_PREFER_WHOLE = 100.0
"""Picoseconds by which sums that stay partial must pay."""

Kind = Literal["replicate", "star", "partial", "split"]


@dataclass(frozen=True)
class Strategy:
    """One way to run an op on all ranks."""

    kind: Kind
    ins: tuple[State, ...]
    """State each operand must arrive in."""
    outs: tuple[State, ...]
    ticks: float
    """Picoseconds of the op itself, forward and backward."""
    split: Dim | None = None


@dataclass
class Facts:
    """What is known of the values of a program, by node."""

    trained: set[fx.Node]
    """Nodes a gradient flows back through."""
    from_parameters: set[fx.Node]
    """Nodes whose value depends on a parameter."""
    only_parameters: set[fx.Node]
    """Nodes computed from parameters (and constants) alone."""
    selecting: set[fx.Node] = field(default_factory=set)
    """Linears whose outputs a top-k or a sort reads: routers."""
    picked: set[fx.Node] = field(default_factory=set)
    """Matrices picked by an index from a parameter that holds many, such as experts."""


@dataclass
class Choices:
    """Enumerates the strategies of each node of one program."""

    cost: CostModel
    sizes: Sizes
    facts: Facts
    batch: set[Dim]
    """Leaves of the batch dim: tensor parallelism never splits them."""
    weights: set[Dim]
    """Leaves that occur in a weight matrix; the other leaves are stream dims, such as seq."""
    widths: frozenset[Dim] = frozenset()
    """Widths of residual streams: one, or an encoder's and a decoder's."""
    allow_stream: bool = True
    atoms: Atoms = field(default_factory=Atoms)
    pinned: set[fx.Node] = field(default_factory=set)
    """Parameters whose placement a user asks for."""
    inner: set[Dim] = field(default_factory=set)
    """Dims that attention needs whole or sums over (see `attention`)."""

    def __post_init__(self) -> None:
        self._usable: dict[Dim, str] = {}
        self._hints: dict[Dim, int] = {}

    def strategies(self, node: fx.Node) -> list[Strategy]:
        """All strategies of a call, replicate first."""
        inputs = operands(node)
        rule: Rule | None = node.meta["rule"]
        backward = node in self.facts.trained
        work = Work(node, rule, self.cost, backward)
        n_ins, n_outs = len(inputs), len(values(node))
        whole = work.ticks(1.0, (False,) * n_ins, (False,) * n_outs)
        found = [Strategy("replicate", (R,) * n_ins, (R,) * n_outs, whole)]
        if rule is None:
            return found
        stars = tuple(STAR if backward and n in self.facts.trained else R for n in inputs)
        if backward:
            late = found[0].ticks + _PREFER_WHOLE
            found.append(Strategy("star", stars, (STAR,) * n_outs, late))
        for group in rule.linear:
            ins = tuple(P if i in group else s for i, s in enumerate(stars))
            # Of equal plans, the one that sums early rounds less.
            late = work.partial_ticks() + _PREFER_WHOLE
            found.append(Strategy("partial", ins, (P,) * n_outs, late))
        found.extend(self._splits(node, rule, inputs, stars, work))
        return found

    def _splits(
        self,
        node: fx.Node,
        rule: Rule,
        inputs: list[fx.Node],
        stars: tuple[State, ...],
        work: Work,
    ) -> list[Strategy]:
        in_dims = [n.meta["dims"][0] for n in inputs]
        out_dims = node.meta["dims"]
        found = []
        for atom in self.candidates(node, rule, in_dims, out_dims):
            has_in = [self._has(dims, atom) for dims in in_dims]
            has_out = [self._has(dims, atom) for dims in out_dims]
            ins = tuple(atom if h else s for h, s in zip(has_in, stars, strict=True))
            inner = any(self._bound_has(node, name, atom) for name in rule.inner)
            lost = R if inner or not any(has_in) else P
            outs = tuple(atom if h else lost for h in has_out)
            fraction = share(self.hint(atom), self.cost.size, 0) / self.hint(atom)
            spent = work.ticks(fraction, has_in, has_out)
            if inner:
                # Without latency: what a few numbers a row save is not having the rows whole.
                spent += 2 * ticks(self.cost.volume("all_reduce", work.inner_bytes()))
            found.append(Strategy("split", ins, outs, spent, atom))
        return found

    def candidates(
        self,
        node: fx.Node,
        rule: Rule,
        in_dims: list[tuple[MaybeDim, ...]],
        out_dims: list[tuple[MaybeDim, ...]],
    ) -> list[Dim]:
        """Named dims that may be split at this op, in order of appearance."""
        leaves: dict[Dim, None] = {}
        refused: set[Dim] = set()
        for dims in (*in_dims, *out_dims):
            seen: set[Dim] = set()
            for dim in dims:
                if dim is None:
                    continue
                inside = self.atoms.leaves(dim)
                refused |= (seen & inside) | (inside - self.atoms.splitting(dim))
                refused |= self.atoms.torn(dim)
                seen |= inside
                leaves.update(dict.fromkeys(ordered(inside)))
        bound: dict[str, Dim] = node.meta["bound"]
        for name in rule.whole:
            if name in bound:
                refused |= self.atoms.leaves(bound[name])
        for dim in node.meta["conflicts"]:
            refused |= self.atoms.leaves(dim)
        for name in rule.plain:
            if name in bound:
                refused |= {
                    a for a in self.atoms.splitting(bound[name]) if not is_plain(bound[name], a)
                }
        if self._is_table(node, leaves):
            refused |= self.widths
        contracts = self._is_weight_contraction(node, rule)
        if contracts and not self.pinned.intersection(operands(node)):
            refused |= self.unnatural(node, rule)
        if not contracts and not all(n in self.facts.only_parameters for n in operands(node)):
            # A residual stream split by width would save what one split by sequence saves, for
            # small all-reduces in every norm; only a column parallel linear may make one.
            refused |= self.widths
        stream = not self.allow_stream or contracts
        return [
            atom
            for atom in leaves
            if atom not in refused
            and not self.unusable(atom)
            and not (stream and atom not in self.weights)
            and _is_diagonal(rule, bound, atom, self.atoms)
        ]

    def unnatural(self, node: fx.Node, rule: Rule) -> set[Dim]:
        """Named dims that a linear may be split by, but for little memory and much traffic."""
        bound: dict[str, Dim] = node.meta["bound"]
        inside = {f: self.atoms.leaves(dim) for f, dim in bound.items()}
        if node in self.facts.selecting:
            # Sums in another order may round to another choice, and ranks must choose alike.
            return {atom for atoms in inside.values() for atom in atoms if atom in self.weights}
        if any(has_sum_beyond(dim, self.inner) for dim in bound.values()):
            return set()  # a fused weight has few ways
        found = self.inner & frozenset[Dim]().union(*inside.values())
        contracted = (inside[f] for f in rule.contracted() if f in inside)
        return found | (self.widths & frozenset[Dim]().union(*contracted))

    def _is_table(self, node: fx.Node, leaves: Iterable[Dim]) -> bool:
        """Whether an embedding has rows to split: then it is vocabulary parallel.

        Splitting its width would send less, but leave a tied head without its vocabulary split.
        """
        is_lookup = node.target is torch.ops.aten.embedding.default
        return is_lookup and any(
            leaf not in self.widths and leaf in self.weights and not self.unusable(leaf)
            for leaf in leaves
        )

    def output_states(self, dims: tuple[MaybeDim, ...]) -> list[State]:
        """How a value of the model may leave it as a DTensor: whole, or in even chunks."""
        found: list[State] = [R]
        for dim in dims:
            for atom in ordered(self.atoms.splitting(dim)):
                once = sum(atom in self.atoms.leaves(other) for other in dims) == 1
                even = self.hint(atom) % self.cost.size == 0 and not self.unusable(atom)
                if once and even and is_plain(dim, atom):  # type: ignore[arg-type]
                    found.append(atom)
        return found

    def unusable(self, atom: Dim) -> str:
        """Why a named dim cannot be split at this degree, or ""."""
        if atom not in self._usable:
            self._usable[atom] = self._reason(atom)
        return self._usable[atom]

    def _reason(self, atom: Dim) -> str:
        size, degree = self.hint(atom), self.cost.size
        if degree == 1:
            return "there is one rank"
        if atom in self.batch:
            return "batch is not split by tensor parallelism"
        if size < degree:
            return f"{size} units cannot be shared by {degree} ranks"
        if atom not in self.weights and size % degree:
            return f"{size} is not divisible by {degree}"
        return ""

    def resident_ticks(self, node: fx.Node, state: State) -> float:
        """Picoseconds that a parameter's local bytes are worth."""
        val = node.meta["val"]
        nbytes: float = bytes_of(val)
        if isinstance(state, Dim):
            # The mean over ranks: the price is a preference for sharding, not for even shares.
            nbytes /= self.cost.size
        return ticks(self.cost.resident(nbytes, val.ndim, node in self.facts.trained))

    def hint(self, atom: Dim) -> int:
        """The example size of a named dim."""
        if atom not in self._hints:
            self._hints[atom] = self.sizes.hint(atom.size)
        return self._hints[atom]

    def _has(self, dims: tuple[MaybeDim, ...], atom: Dim) -> bool:
        return any(dim is not None and atom in self.atoms.leaves(dim) for dim in dims)

    def _bound_has(self, node: fx.Node, name: str, atom: Dim) -> bool:
        bound = node.meta["bound"].get(name)
        return bound is not None and atom in self.atoms.leaves(bound)

    def _is_weight_contraction(self, node: fx.Node, rule: Rule) -> bool:
        """A linear (or embedding) on a weight is column parallel, row parallel or replicated."""
        if not rule.contracted():
            return False
        return any(
            n in self.facts.only_parameters and len(n.meta["dims"][0]) >= 2 for n in operands(node)
        )


def is_plain(dim: Dim, atom: Dim) -> bool:
    """Whether pieces by the atom are contiguous chunks of the dim."""
    segments = segments_of(dim, atom)
    return len(segments) == 1 and segments[0][0] == 1


def _is_diagonal(rule: Rule, bound: dict[str, Dim], atom: Dim, atoms: Atoms) -> bool:
    """Whether the factors that contain `atom` are one, or all terms of one sum."""
    having = {name for name, dim in bound.items() if atom in atoms.leaves(dim)}
    if len(having) <= 1:
        return bool(having)
    sums = [dim for spec in (*rule.ins, *rule.outs) for dim in spec if len(dim) > 1]
    return any(having <= _names(dim) for dim in sums) and not having & rule.plain


def _names(dim: DimSpec) -> set[str]:
    return {name for term in dim for name in term}
