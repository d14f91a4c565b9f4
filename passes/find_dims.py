"""Say which named dims are the batch, which belong to weights, and give them readable names."""

from collections import Counter

import torch
from torch import fx

from tpcompile.attention import inner_dims
from tpcompile.dim_names import give_names
from tpcompile.dims import Atoms, Dim
from tpcompile.facts import batch_dims, facts_of, weight_dims
from tpcompile.program import Program, operands
from tpcompile.strategies import Facts
from tpcompile.units import units_in


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
    program.extra["widths"] = _widths(program, atoms, facts)
    give_names(program, atoms)
    return program


def _units(program: Program, weights: set[Dim], atoms: Atoms) -> set[Dim]:
    """Products of weights' leaves that the ranks can share only as a whole."""
    cost = program.extra.get("cost")
    if cost is None:  # for naming alone
        return set()
    dims = [dim for node in program.placeholders("parameter") for dim in node.meta["dims"][0]]
    found = set[Dim]().union(*(units_in(dim, cost.size) for dim in dims))
    facts: Facts = program.extra["facts"]
    inner = set[Dim]().union(*(inner_dims(node, facts, atoms) for node in program.calls()))
    return {unit for unit in found if atoms.leaves(unit) <= weights - inner}


def _widths(program: Program, atoms: Atoms, facts: Facts) -> dict[Dim, None]:
    """The width of the residual stream, or of several: an encoder's and a decoder's.

    It is the leaf that occurs in most weight matrices, if one does, of the model or of one of its
    blocks and others; and in a sum of two values, which the inner dim of an MLP without a residual
    does not.
    """
    regions: dict[str, Counter[Dim]] = {}
    blocks: set[str] = program.extra.get("block_paths", set())
    for node in program.placeholders("parameter"):
        dims = node.meta["dims"][0]
        if node in facts.only_parameters and len(dims) >= 2:
            name = program.leaves[node.name].name
            region = next((block for block in blocks if name.startswith(f"{block}.")), "")
            leaves = {leaf for dim in dims for leaf in atoms.leaves(dim)}
            regions.setdefault(region, Counter()).update(leaves)
    spread = Counter(leaf for region in regions.values() for leaf in region)
    most = [_most_common(sum(regions.values(), Counter()))]
    most += [leaf for r in regions.values() if (leaf := _most_common(r)) and spread[leaf] > 1]
    sums = (node for node in program.calls(_ADD) if _is_of_two(node, facts))
    summed = {leaf for node in sums for d in node.meta["dims"][0][-1:] for leaf in atoms.leaves(d)}
    return {leaf: None for leaf in most if leaf in summed}


def _most_common(counts: Counter[Dim]) -> Dim | None:
    first, second = [*counts.most_common(2), (None, 0), (None, 0)][:2]
    return first[0] if first[1] > max(second[1], 2) else None


_ADD = torch.ops.aten.add.Tensor


def _is_of_two(node: fx.Node, facts: Facts) -> bool:
    """Whether a call has two operands that depend on the input and on parameters."""
    values = [n for n in operands(node) if n in facts.from_parameters]
    return len(values) == 2 and not any(n in facts.only_parameters for n in values)
