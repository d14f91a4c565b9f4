"""What can be said of every value before anything is decided."""

import operator

import torch
from torch import fx

from tpcompile.cache_plan import cached_inputs
from tpcompile.dims import Atoms, Dim
from tpcompile.program import Program, operands, values
from tpcompile.strategies import Facts

_NO_GRADIENT = (
    "aten.detach",
    "aten.new_",
    "aten.zeros_like",
    "aten.ones_like",
    "aten.full_like",
    "aten.empty_like",
    "aten.rand_like",
    "aten.randn_like",
    "aten.sign",
    "aten.argmax",
)


_SELECTIONS = tuple(f"aten.{op}" for op in ("topk", "sort", "argsort", "argmax", "multinomial"))


def facts_of(program: Program) -> Facts:
    """Which values are trained, depend on parameters, or on parameters alone."""
    facts = Facts(set(), set(), set())
    cached = cached_inputs(program)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            leaf = program.leaves[node.name]
            if node.meta["val"].requires_grad or node.meta.get("trained"):
                facts.trained.add(node)
            if leaf.kind == "parameter":
                facts.from_parameters.add(node)
                facts.only_parameters.add(node)
            elif node in cached:
                facts.from_parameters.add(node)  # by a call before
        elif node.op == "call_function":
            _derive(node, facts, program)
    _find_selecting(program, facts)
    return facts


def _find_selecting(program: Program, facts: Facts) -> None:
    """Note the linears from which only maps, views and reductions lead to a selection.

    Not heads over a vocabulary, whose choice is an output.
    """
    rows = max((_rows(t) for t in program.calls(torch.ops.aten.embedding.default)), default=0)
    waiting = [n for call in program.calls() if _selects(call) for n in operands(call)[:1]]
    seen: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node in seen or node not in facts.from_parameters or node.op == "placeholder":
            continue
        seen.add(node)
        rule = node.meta.get("rule")
        weights = [n for n in operands(node) if n in facts.only_parameters and _is_matrix(n)]
        if node.target is operator.getitem:
            waiting.append(node.args[0])  # type: ignore[arg-type]
        elif rule is not None and rule.contracted() and weights:
            if values(node)[0].shape[-1:] != (rows,):
                facts.selecting.add(node)
        elif rule is None or len(operands(node)) < 2 or not rule.contracted():
            waiting += operands(node)


def _selects(node: fx.Node) -> bool:
    return str(node.target).startswith(_SELECTIONS)


def _is_matrix(node: fx.Node) -> bool:
    return node.meta["val"].ndim >= 2


def _rows(embedding: fx.Node) -> int:
    return int(operands(embedding)[0].meta["val"].shape[0])


def _derive(node: fx.Node, facts: Facts, program: Program) -> None:
    inputs = [node.args[0]] if node.target is operator.getitem else operands(node)
    sources = [n for n in inputs if isinstance(n, fx.Node)]
    if any(n in facts.from_parameters for n in sources):
        facts.from_parameters.add(node)
        if all(n in facts.only_parameters or _is_constant(n, program) for n in sources):
            facts.only_parameters.add(node)
    if sources and _is_picked(node, sources, facts):
        facts.picked.add(node)
    floating = any(v.is_floating_point() or v.is_complex() for v in values(node))
    if (
        floating
        and any(n in facts.trained for n in sources)
        and not str(node.target).startswith(_NO_GRADIENT)
    ) or (node.target is operator.getitem and sources[0] in facts.trained):
        facts.trained.add(node)


def _is_constant(node: fx.Node, program: Program) -> bool:
    leaf = program.leaves.get(node.name)
    return leaf is not None and leaf.kind in ("buffer", "constant")


def batch_dims(program: Program, atoms: Atoms) -> set[Dim]:
    """Leaves of dim 0 of every input."""
    found: set[Dim] = set()
    for node in program.placeholders("input"):
        dims = node.meta["dims"][0]
        if dims:
            found |= atoms.leaves(dims[0])
    return found


def _is_picked(node: fx.Node, sources: list[fx.Node], facts: Facts) -> bool:
    """Whether a value is picked, by an index, from the matrices of a parameter; or a view of it."""
    if len(sources) == 1:
        return sources[0] in facts.picked
    is_index = str(node.target).startswith(("aten.index.", "aten.index_select.", "aten.gather."))
    return is_index and sources[0] in facts.only_parameters and sources[0].meta["val"].ndim >= 3


def weight_dims(program: Program, atoms: Atoms, facts: Facts) -> set[Dim]:
    """Leaves that occur in a weight matrix some op contracts, or in a vector beside one."""
    found: set[Dim] = set()
    for node in program.calls():
        rule = node.meta.get("rule")
        if rule is None or not rule.contracted():
            continue
        for source in operands(node):
            dims = source.meta["dims"][0]
            if (source in facts.only_parameters and len(dims) >= 2) or source in facts.picked:
                for dim in dims:
                    found |= atoms.leaves(dim)
    # Not what a parameter is spread over before it is contracted, such as the sequence.
    parameters = (n.meta["dims"][0] for n in program.placeholders("parameter"))
    return found & {leaf for dims in parameters for dim in dims for leaf in atoms.leaves(dim)}
