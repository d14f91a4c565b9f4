"""Say which named dims are the batch, which belong to weights, and give them readable names."""

from collections import Counter

from torch import fx

from tpcompile.dims import Atoms, Dim, ordered
from tpcompile.facts import batch_dims, facts_of, weight_dims
from tpcompile.program import Program
from tpcompile.strategies import Facts

_FIRST_NAMES = {
    "aten.scaled_dot_product_attention": {
        "kv": "kv_heads", "r": "q_per_kv", "h": "heads", "d": "head_dim", "e": "head_dim",
    },
    "aten.embedding": {"v": "vocab", "h": "hidden"},
}
_LATER_NAMES = {
    "aten.linear": {"n": "out", "k": "in"},
    "aten.mm": {"n": "out", "k": "in"},
}
"""Op -> factor -> what its leaves are called."""


def find_dims(program: Program) -> Program:
    """Set `extra["facts"]`, `["batch"]`, `["weights"]`, and the names of the leaves.

    Before:  %y = linear(%x, %w)   dims (2, 8, 11008)
    After:   %y = linear(%x, %w)   dims (batch, seq, layers.0.mlp.n)
    """
    atoms = Atoms()
    facts = program.extra["facts"] = facts_of(program)
    batch = program.extra["batch"] = batch_dims(program, atoms)
    program.extra["weights"] = weight_dims(program, atoms, facts) - batch
    program.extra["width"] = _width(program, atoms, facts)
    _name_inputs(program, atoms, batch)
    for table in (_FIRST_NAMES, _LATER_NAMES):
        for node in program.calls():
            for prefix, names in table.items():
                if str(node.target).startswith(prefix):
                    _name_weights(node, names, atoms)
    return program


def _width(program: Program, atoms: Atoms, facts: Facts) -> Dim | None:
    """The width of the residual stream: the leaf that occurs in most weight matrices."""
    counts: Counter[Dim] = Counter()
    for node in program.placeholders("parameter"):
        dims = node.meta["dims"][0]
        if node in facts.only_parameters and len(dims) >= 2:
            counts.update({leaf for dim in dims for leaf in atoms.leaves(dim)})
    return max(counts, key=lambda leaf: (counts[leaf], leaf.size, -leaf.serial), default=None)


def _name_inputs(program: Program, atoms: Atoms, batch: set[Dim]) -> None:
    for atom in batch:
        atom.name = "batch"
    for node in program.placeholders("input"):
        for place, dim in enumerate(node.meta["dims"][0][1:], 1):
            for atom in ordered(atoms.leaves(dim)):
                if not atom.name and atom not in program.extra["weights"]:
                    atom.name = "seq" if place == 1 else f"{program.leaves[node.name].name}.{place}"


def _name_weights(node: fx.Node, names: dict[str, str], atoms: Atoms) -> None:
    """Name leaves after the op that first meets them: its module and the factor's meaning."""
    path = node.meta.get("path", "")
    bound: dict[str, Dim] = node.meta.get("bound", {})
    for factor, name in names.items():
        if factor not in bound:
            continue
        # In "heads" the larger unit comes first: kv heads, then query heads a kv head.
        leaves = [leaf for leaf in _in_order(bound[factor]) if not leaf.name]
        for leaf, short in zip(leaves, _suffixed(name, len(leaves)), strict=True):
            scope = path if short.startswith(("out", "in")) else path.rpartition(".")[0]
            leaf.name = short if short in ("vocab", "hidden") else f"{scope}.{short}".lstrip(".")


def _suffixed(name: str, count: int) -> list[str]:
    if name == "heads" and count == 2:
        return ["kv_heads", "q_per_kv"]
    return [name if i == 0 else f"{name}{i + 1}" for i in range(count)]


def _in_order(dim: Dim) -> list[Dim]:
    root = dim.root()
    parts = root.factors or root.terms
    found = [leaf for part in parts for leaf in _in_order(part)] if parts else [root]
    return list(dict.fromkeys(found))
