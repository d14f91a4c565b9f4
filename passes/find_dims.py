"""Say which named dims are the batch, which belong to weights, and give them readable names."""

from torch import fx

from tpcompile.dims import Atoms, Dim
from tpcompile.facts import batch_dims, facts_of, weight_dims
from tpcompile.program import Program, operands

_FACTOR_NAMES = {"v": "vocab", "h": "heads", "kv": "kv_heads", "r": "groups", "d": "head_dim"}


def find_dims(program: Program) -> Program:
    """Set `extra["facts"]`, `["batch"]`, `["weights"]`, and the names of the leaves.

    Before:  %y = linear(%x, %w)   dims (2, 8, 11008)
    After:   %y = linear(%x, %w)   dims (batch, seq, layers.0.mlp.n)
    """
    atoms = Atoms()
    facts = program.extra["facts"] = facts_of(program)
    batch = program.extra["batch"] = batch_dims(program, atoms)
    program.extra["weights"] = weight_dims(program, atoms, facts) - batch
    _name_inputs(program, atoms, batch)
    for node in program.calls():
        _name_weights(node, atoms)
    return program


def _name_inputs(program: Program, atoms: Atoms, batch: set[Dim]) -> None:
    for atom in sorted(batch, key=lambda a: a.size):
        atom.name = "batch"
    for node in program.placeholders("input"):
        for place, dim in enumerate(node.meta["dims"][0][1:], 1):
            for atom in atoms.leaves(dim):
                if not atom.name and atom not in program.extra["weights"]:
                    atom.name = "seq" if place == 1 else f"{program.leaves[node.name].name}.{place}"


def _name_weights(node: fx.Node, atoms: Atoms) -> None:
    """Name leaves after the op that first meets them: its module and the factor's letter."""
    target = str(node.target)
    bound: dict[str, Dim] = node.meta.get("bound", {})
    if target.startswith("aten.embedding"):
        names = {"v": "vocab", "h": "hidden"}
    elif target.startswith("aten.scaled_dot_product_attention"):
        names = _FACTOR_NAMES
    elif target.startswith(("aten.linear", "aten.mm", "aten.addmm")):
        names = {"n": "out", "k": "in"}
    else:
        return
    path = node.meta.get("path", "")
    parent = path.rpartition(".")[0]
    for factor, dim in bound.items():
        if factor not in names:
            continue
        for atom in sorted(atoms.leaves(dim), key=lambda a: -a.size):
            if not atom.name:
                scope = path if names[factor] in ("in", "out") else parent
                short = names[factor]
                atom.name = f"{scope}.{short}" if scope and short not in ("hidden",) else short


__all__ = ["find_dims", "operands"]
