"""Readable names for named dims, from the ops and modules that meet them first."""

from collections import defaultdict
from collections.abc import Iterable
from itertools import takewhile
from typing import Any

from torch import fx

from tpcompile.dims import Atoms, Dim, ordered
from tpcompile.program import Program, operands

_ATTENTION = "aten.scaled_dot_product_attention"
_LINEAR = ("aten.linear", "aten.mm", "aten.addmm", "aten.matmul", "aten.bmm")


def give_names(program: Program, atoms: Atoms) -> None:
    """Set `name` of the dims: batch, seq, hidden, vocab, and by block heads, head_dim, ffn.

    A dim that one block alone uses is named after it, `layers.3.ffn`; what all module paths of
    blocks share is left out.
    """
    namer = _Namer(program, atoms)
    namer.name_inputs()
    for width in program.extra["widths"]:
        namer.give(width, "hidden")
    namer.name_tables()
    for node in program.calls():
        if str(node.target).startswith(_ATTENTION):
            namer.name_attention(node)
    for node in program.calls():
        if str(node.target).startswith(_LINEAR):
            namer.name_linear(node)


class _Namer:
    """Names given so far, and where each dim is used."""

    def __init__(self, program: Program, atoms: Atoms) -> None:
        self.program, self.atoms = program, atoms
        self.paths: set[str] = program.extra.get("block_paths", set())
        self.prefix = shared_prefix(self.paths)
        self.taken: set[str] = set()
        self.homes: dict[Dim, set[str]] = defaultdict(set)
        """Dim -> blocks in which a rule binds it."""
        self.contracted: set[Dim] = set()
        """Leaves that a linear sums over."""
        self.vocab: set[int] = set()
        """Sizes of the tables called vocab."""
        for node in program.calls():
            self._note(node)

    def _note(self, node: fx.Node) -> None:
        rule, bound = node.meta.get("rule"), node.meta.get("bound", {})
        if rule is None:
            return
        home, contracted = self.block(node), rule.contracted()
        for factor, dim in bound.items():
            for each in (dim.root(), *self.atoms.leaves(dim)):
                self.homes[each].add(home)
            if factor in contracted and str(node.target).startswith(_LINEAR):
                self.contracted |= self.atoms.leaves(dim)

    def block(self, node: fx.Node) -> str:
        """Path of the repeated block a node is in, or ""."""
        return next((m for m in node.meta.get("modules", ()) if m in self.paths), "")

    def give(self, dim: Dim, name: str, node: fx.Node | None = None) -> None:
        """Name a dim that has none, after the block or module of `node` where it belongs there."""
        dim = dim.root()
        if dim.name:
            return
        scopes = [""]
        if node is not None:
            block, path = self.block(node), node.meta.get("path", "")
            local = self.homes[dim] <= {block}
            scopes = [block, path] if block and local else [path] if local else ["", path]
        names = [".".join(filter(None, (s.removeprefix(self.prefix), name))) for s in scopes]
        names += [f"{names[-1]}_{i}" for i in range(2, len(self.taken) + 3)]
        dim.name = next(each for each in names if each not in self.taken)
        self.taken.add(dim.name)

    def name_inputs(self) -> None:
        """The leaves of dim 0 are the batch, of dim 1 the sequence."""
        for atom in ordered(self.program.extra["batch"]):
            atom.name = "batch"
        for node in self.program.placeholders("input"):
            for place, dim in enumerate(node.meta["dims"][0][1:], 1):
                for atom in ordered(self.atoms.leaves(dim)):
                    if not atom.name and atom not in self.program.extra["weights"]:
                        name = self.program.leaves[node.name].name
                        atom.name = "seq" if place == 1 else f"{name}.{place}"

    def name_tables(self) -> None:
        """Rows of the largest embedding are the vocabulary, of any other its module's rows."""
        tables = [n for n in self.program.calls() if str(n.target).startswith("aten.embedding")]
        bound = [(n, n.meta["bound"]) for n in tables if n.meta["bound"].keys() >= {"v", "h"}]
        largest = max((b["v"].size for _, b in bound), default=0)
        for node, dims in bound:
            self.give(dims["h"], "width", node)
            if dims["v"].size == largest:
                self.vocab.add(largest)
                self.give(dims["v"], "vocab", node if dims["v"].root().name else None)
        for node, dims in bound:
            self.give(dims["v"], "rows", node)

    def name_attention(self, node: fx.Node) -> None:
        """Heads, and the width of one; the larger unit is first: kv heads, then queries each."""
        bound: dict[str, Dim] = node.meta["bound"]
        if "h" in bound:
            grouped = "r" in bound
            leaves = _in_order(bound["h"])
            names = ["kv_heads", "q_per_kv"] if len(leaves) == 2 else ["heads"]
            names = ["kv_heads"] if grouped else names
            for leaf, name in zip(leaves, names, strict=False):
                self.give(leaf, name, node)
            if bound["h"].root() in self.atoms.units:
                self.give(bound["h"], "heads", node)
        if "r" in bound:
            self.give(bound["r"], "q_per_kv", node)
        for factor in ("d", "e"):
            if factor in bound:
                self._name_whole(bound[factor], "head_dim", node)

    def _name_whole(self, dim: Dim, name: str, node: fx.Node) -> None:
        """Name a dim even where it has parts (rotary positions cut a head in halves)."""
        root = dim.root()
        scoped = root.name
        if not scoped:
            # The values' head dim is another one of the same meaning: it may share the name.
            root.name = name
        parts = _in_order(root)
        if parts != [root]:
            names = [f"{name}_half"] if len(parts) == 1 else [f"{name}_part{i}" for i in range(9)]
            for part, each in zip(parts, names, strict=False):
                part.name = part.name or each

    def name_linear(self, node: fx.Node) -> None:
        """What a linear makes and another sums over is `ffn`, or heads where it is a product."""
        rule, bound = node.meta.get("rule"), node.meta.get("bound", {})
        if rule is None:
            return
        weights = [n for n in operands(node) if n in self.program.extra["facts"].only_parameters]
        for dims in (n.meta["dims"][0] for n in weights if len(n.meta["dims"][0]) == 2):
            made = next((d for d in dims if d is not None and _is_made(d, rule, bound)), None)
            if made is not None:
                self._name_made(made, node)

    def _name_made(self, dim: Dim, node: fx.Node) -> None:
        leaves = _in_order(dim)
        if len(leaves) == 1 and leaves[0].size in self.vocab and leaves[0] not in self.contracted:
            names = ["vocab"]
        elif dim.root().factors is not None and leaves[-1] not in self.contracted:
            return
        elif len(leaves) > 1 and dim.root().factors is not None:
            names = ["heads", "head_dim"] if len(leaves) == 2 and leaves[0].size > 3 else []
        else:
            names = ["ffn" if leaf in self.contracted else "out" for leaf in leaves]
        for leaf, name in zip(leaves, names, strict=False):
            self.give(leaf, name, node)


def _is_made(dim: Dim, rule: Any, bound: dict[str, Dim]) -> bool:
    """Whether a linear makes this dim of its weight rather than sum over it."""
    return any(d.root() is dim.root() for f, d in bound.items() if f not in rule.contracted())


def _in_order(dim: Dim) -> list[Dim]:
    root = dim.root()
    parts = root.factors or root.terms
    found = [leaf for part in parts for leaf in _in_order(part)] if parts else [root]
    return list(dict.fromkeys(found))


def shared_prefix(paths: Iterable[str]) -> str:
    """What comes before the containers of all blocks.

    >>> shared_prefix({"model.layers.0", "model.layers.1"})
    'model.'
    >>> shared_prefix({"encoder.block.0", "decoder.block.0"})
    ''
    """
    parents = sorted({path.rpartition(".")[0].rpartition(".")[0] for path in paths})
    columns = zip(*(parent.split(".") for parent in parents), strict=False)
    shared = takewhile(lambda parts: len(set(parts)) == 1 and parts[0], columns)
    return "".join(f"{parts[0]}." for parts in shared)
