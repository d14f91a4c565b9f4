"""The dims inside of attention: what queries and keys are multiplied over, and values carry."""

from collections.abc import Iterable

from torch import fx

from tpcompile.dims import Atoms, Dim
from tpcompile.program import operands
from tpcompile.rule import Rule, factors_of
from tpcompile.strategies import Choices, Facts


def inner_dims(node: fx.Node, facts: Facts, atoms: Atoms) -> set[Dim]:
    """Leaves that a product of two activations sums over, or attention needs whole."""
    rule: Rule | None = node.meta.get("rule")
    if rule is None or any(n in facts.only_parameters or n in facts.picked for n in operands(node)):
        return set()
    if str(node.target).startswith("aten.scaled_dot_product"):
        factors = {"d", "e"}
    else:
        both = [factors_of([spec]) for spec in rule.ins]
        factors = both[0] & both[1] & rule.contracted() if len(both) == 2 else set()
    bound: dict[str, Dim] = node.meta["bound"]
    return {leaf for f in factors if f in bound for leaf in atoms.leaves(bound[f])}


def avoidable(nodes: Iterable[fx.Node], choices: Choices) -> set[Dim]:
    """Inner dims of ops that can be split otherwise, by their heads.

    With fewer key heads than ranks a key's weight is rather kept whole than its width split.
    """
    found: set[Dim] = set()
    for node in nodes:
        inner = inner_dims(node, choices.facts, choices.atoms)
        if inner:
            dims = [n.meta["dims"][0] for n in operands(node)]
            ways = choices.candidates(node, node.meta["rule"], dims, node.meta["dims"])
            if any(atom in choices.weights and atom not in inner for atom in ways):
                found |= inner & choices.weights
    return found
