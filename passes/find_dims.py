"""Say which named dims are the batch, which belong to weights, and give them readable names."""

from collections import Counter

from tpcompile.dim_names import give_names
from tpcompile.dims import Atoms, Dim, units_in
from tpcompile.facts import batch_dims, facts_of, weight_dims
from tpcompile.program import Program
from tpcompile.strategies import Facts


def find_dims(program: Program) -> Program:
    """Set `extra["facts"]`, `["atoms"]`, `["batch"]`, `["weights"]`, and the names of the leaves.

    Before:  %y = linear(%x, %w)   dims (2, 8, 11008)
    After:   %y = linear(%x, %w)   dims (batch, seq, layers.0.ffn)
    """
    atoms = Atoms()
    facts = program.extra["facts"] = facts_of(program)
    batch = program.extra["batch"] = batch_dims(program, atoms)
    weights = weight_dims(program, atoms, facts) - batch
    units = _units(program, weights, atoms)
    atoms = program.extra["atoms"] = Atoms(units)
    program.extra["weights"] = weights | units
    program.extra["width"] = _width(program, atoms, facts)
    give_names(program, atoms)
    return program


def _units(program: Program, weights: set[Dim], atoms: Atoms) -> set[Dim]:
    """Products of weights' leaves that the ranks can share only as a whole."""
    degree = program.extra["cost"].size
    dims = [dim for node in program.placeholders("parameter") for dim in node.meta["dims"][0]]
    found = set[Dim]().union(*(units_in(dim, degree) for dim in dims))
    return {unit for unit in found if atoms.leaves(unit) <= weights}


def _width(program: Program, atoms: Atoms, facts: Facts) -> Dim | None:
    """The width of the residual stream: the leaf that occurs in most weight matrices, if one does.

    Two matrices are not enough: the inner dim of an MLP without a residual is in two.
    """
    counts: Counter[Dim] = Counter()
    for node in program.placeholders("parameter"):
        dims = node.meta["dims"][0]
        if node in facts.only_parameters and len(dims) >= 2:
            counts.update({leaf for dim in dims for leaf in atoms.leaves(dim)})
    first, second = [*counts.most_common(2), (None, 0), (None, 0)][:2]
    return first[0] if first[1] > max(second[1], 2) else None
