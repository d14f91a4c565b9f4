"""Where the tensors of caches are split: as a call before left them, or as costs least."""

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from tpcompile.caches import HEADS, Entries, Entry
from tpcompile.dims import Dim, MaybeDim, contains, ordered, segments_of
from tpcompile.placement import R, State
from tpcompile.program import Program, operands, values
from tpcompile.sizes import Sizes
from tpcompile.strategies import Choices, is_plain


@dataclass
class CachePlan:
    """The tensors of caches among a program's inputs and outputs."""

    choices: Choices
    known: Entries
    """How earlier captures of the model deal them out."""
    inputs: dict[fx.Node, str] = field(default_factory=dict)
    """Placeholder -> path in its cache."""
    outputs: dict[int, str] = field(default_factory=dict)
    """Operand of the output node -> path in its cache."""

    def states(self, dims: tuple[MaybeDim, ...], path: str) -> list[State]:
        """What a tensor of a cache may be: whole, or split by heads."""
        atoms, dim = self.choices.atoms, dims[HEADS]
        found: list[State] = [R]
        for atom in ordered(atoms.splitting(dim)):
            once = sum(atom in atoms.leaves(other) for other in dims) == 1
            usable = atom in self.choices.weights and not self.choices.unusable(atom)
            if once and usable and is_plain(dim, atom):  # type: ignore[arg-type]
                found.append(atom)
        if path in self.known:
            found = [s for s in found if _entry(dims, s, self.choices.sizes) == self.known[path]]
            assert found, f"{path} is {self.known[path]} elsewhere"
        return found

    def prices(self, states: list[State]) -> list[float]:
        """Picoseconds that a tensor given to a call costs in each state: a part is preferred."""
        return [1.0 * (s == R) for s in states]

    def source_for(self, slot: int) -> fx.Node | None:
        """The input that an output takes the place of."""
        path = self.outputs.get(slot)
        return next((n for n, other in self.inputs.items() if other == path), None)


def cache_plan(program: Program, choices: Choices) -> CachePlan:
    """The caches of a program; nothing where `extra["caches"]` is None: all is whole then."""
    known: Entries = program.extra.get("caches") or {}
    return CachePlan(choices, known, cached_inputs(program), _cached_outputs(program))


def cached_inputs(program: Program) -> dict[fx.Node, str]:
    """Placeholders that are keys, values or other states of a cache -> their paths in it."""
    if program.extra.get("caches") is None:
        return {}
    paths: dict[str, str] = program.extra["cache_inputs"]
    nodes = program.placeholders("input")
    return {n: paths[n.name] for n in nodes if n.name in paths and _is_state(n.meta["val"])}


def _cached_outputs(program: Program) -> dict[int, str]:
    """Operands of the output node that are states of a cache -> their paths in it."""
    if program.extra.get("caches") is None:
        return {}
    paths: dict[str, str] = program.extra["cache_inputs"]
    entries = program.out_spec.entries
    (returned,) = program.output().args
    names = [*entries[: program.n_outputs], *[""] * (program.n_outputs - len(entries))]
    names += [paths.get(name, "") for name in program.updates]
    tensors = [
        (each, name)
        for each, name in zip(returned, names, strict=True)  # type: ignore[arg-type]
        if isinstance(each, fx.Node) and values(each)
    ]
    return {i: n for i, (node, n) in enumerate(tensors) if n and _is_state(node.meta["val"])}


def planned_entries(program: Program) -> Entries:
    """How the caches of a planned program are dealt out."""
    plan: Any = program.extra["assignment"]
    cached: CachePlan = plan.problem.caches
    found: Entries = {}
    returned = operands(program.output())
    outputs = ((returned[slot], path) for slot, path in cached.outputs.items())
    for node, path in (*cached.inputs.items(), *outputs):
        entry = _entry(node.meta["dims"][0], node.meta["states"][0], cached.choices.sizes)
        assert found.setdefault(path, entry) == entry, f"{path} changes its placement"
    return found


def _is_state(val: Any) -> bool:
    """Not the counters of caches."""
    return val.ndim > HEADS + 1 and val.is_floating_point()


def _entry(dims: tuple[MaybeDim, ...], state: State, sizes: Sizes) -> Entry | None:
    if not isinstance(state, Dim):
        return None
    place = next(i for i, d in enumerate(dims) if d is not None and contains(d, state))
    assert place == HEADS
    ((_, units, inner),) = segments_of(dims[place], state)  # type: ignore[arg-type]
    return Entry(int(sizes.expr(units)), int(sizes.expr(inner)))
