"""Every collective of a planned program: what it sends, where, why, and how many bytes."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from tpcompile.dims import Dim, contains
from tpcompile.formulas import VOLUME, Symbols
from tpcompile.labels import Labels
from tpcompile.placement import P, State, state_text
from tpcompile.program import Program, operands, values
from tpcompile.reasons import op_text
from tpcompile.rule import Rule
from tpcompile.strategies import Facts


@dataclass(frozen=True)
class Sent:
    """One collective in one direction."""

    name: str
    """The node's name in dumps."""
    kind: str
    direction: str
    """forward or backward."""
    tensor: str
    """`bf16[b, s, hidden]`."""
    path: str
    block: str
    formula: Any
    """Bytes that each rank sends, a sympy expression."""
    nbytes: float
    """The formula at the example's sizes."""
    reason: str
    calls: int = 1


def traffic_of(program: Program, symbols: Symbols) -> list[Sent]:
    """Collectives in graph order, forward before backward of each.

    Gradients of replicated parameters that one block reads share an all-reduce, so they are one.
    """
    labels = Labels(program)
    found: list[Sent] = []
    shared: dict[str, list[fx.Node]] = defaultdict(list)
    for node in program.calls():
        what = node.meta.get("conversion")
        if what is None:
            found += _inner(program, node, symbols)
        elif what.step.function == "copy" and what.value.is_parameter:
            if what.value.trained:
                shared[node.meta.get("block", "")].append(node)
        else:
            pair = (("forward", what.step.forward), ("backward", what.step.backward))
            for direction, kind in pair:
                if kind and (direction == "forward" or what.value.trained):
                    found.append(_sent(program, node, kind, direction, symbols, labels))
    return found + [_bucket(block, nodes, symbols) for block, nodes in shared.items()]


def _sent(
    program: Program, node: fx.Node, kind: str, direction: str, symbols: Symbols, labels: Labels
) -> Sent:
    formula = VOLUME[kind] * symbols.size(node.meta["dims"][0]) * node.meta["val"].dtype.itemsize
    what = node.meta["conversion"]
    source = _source(node)
    giver = program.leaves[source.name].name if source.op == "placeholder" else op_text(source)
    reason = f"{giver} gives {_state(what.have)}; {_reader(node)} needs {_state(what.need)}"
    if direction == "backward" and what.step.forward:
        reason = f"takes the gradient back through the {what.step.forward}"
    return Sent(
        node.name, kind, direction, labels.type(node), node.meta.get("path", ""),
        node.meta.get("block", ""), formula, symbols.value(formula), reason,
    )  # fmt: skip


def _source(node: fx.Node) -> fx.Node:
    while "conversion" in node.meta:
        (node,) = operands(node)
    return node


def _reader(node: fx.Node) -> str:
    names = []
    for user in node.users:
        if "conversion" in user.meta:
            names.append(_reader(user))
        else:
            names.append("the model's output" if user.op == "output" else op_text(user))
    several = f" and {len(set(names)) - 1} more" if len(set(names)) > 1 else ""
    return f"{names[0]}{several}" if names else "nothing"


def _state(state: State) -> str:
    words = {"R": "it whole", "R*": "it whole", P: "partial sums"}
    return words.get(state, "") if isinstance(state, str) else state_text(state)


def _bucket(block: str, nodes: list[fx.Node], symbols: Symbols) -> Sent:
    """The one all-reduce of the gradients of a block's replicated parameters."""
    sizes = [symbols.size(n.meta["dims"][0]) * n.meta["val"].dtype.itemsize for n in nodes]
    formula = VOLUME["all_reduce"] * sum(sizes)
    many = f"gradients of {len(nodes)} parameters" if len(nodes) > 1 else "gradient of 1 parameter"
    reason = "every rank has the gradient of its part of the data only"
    return Sent(
        nodes[0].name, "all_reduce", "backward", many, block or "outside of blocks", block,
        formula, symbols.value(formula), reason,
    )  # fmt: skip


def _inner(program: Program, node: fx.Node, symbols: Symbols) -> list[Sent]:
    """What an op's rewrite reduces itself: a cross entropy of split classes, twice a forward."""
    strategy = program.extra["assignment"].strategies.get(node)
    rule: Rule | None = node.meta.get("rule")
    if rule is None or strategy is None or strategy.split is None:
        return []
    bound: dict[str, Dim] = node.meta["bound"]
    if not any(n in bound and contains(bound[n], strategy.split) for n in rule.inner):
        return []
    smoothing = node.args[5] if len(node.args) > 5 else node.kwargs.get("label_smoothing", 0)
    numbers = 6 if smoothing else 4
    targets = operands(node)[1]
    formula = VOLUME["all_reduce"] * symbols.size(targets.meta["dims"][0]) * 4 * numbers
    return [
        Sent(
            node.name,
            "all_reduce",
            "forward",
            f"{numbers} numbers a token",
            node.meta.get("path", ""),
            node.meta.get("block", ""),
            formula,
            symbols.value(formula),
            f"{op_text(node)} reduces over {state_text(strategy.split)}",
            2,
        )
    ]


def counts_of(sent: Iterable[Sent]) -> Counter[tuple[str, str]]:
    """(direction, kind) -> how many."""
    found: Counter[tuple[str, str]] = Counter()
    for each in sent:
        found[each.direction, each.kind] += each.calls
    return found


def folded(text: str) -> str:
    """A path or name with `*` for the numbers of blocks.

    >>> folded("model.layers.3.mlp")
    'model.layers.*.mlp'
    """
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", text)


def megatron_counts(program: Program, *, scattered: bool) -> dict[str, Counter[tuple[str, str]]]:
    """Block -> collectives of Megatron-LM's recipe for the weights that this plan splits.

    An all-reduce after every row parallel layer and vocabulary parallel embedding, and one in the
    backward of every input of column parallel layers (Shoeybi et al. 2019, section 3); with
    sequence parallelism a reduce-scatter and an all-gather each (Korthikanti et al. 2022, section
    4.2.2).  Not counted: its all-gathers of inputs that it drops and gathers again.
    """
    plan = program.extra["assignment"]
    facts: Facts = program.extra["facts"]
    weights, passed = facts.only_parameters, facts.trained - facts.only_parameters
    found: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    inputs: set[tuple[str, fx.Node]] = set()
    for node in program.calls():
        strategy = plan.strategies.get(node)
        rule: Rule | None = node.meta.get("rule")
        if strategy is None or strategy.split is None or rule is None or not rule.contracted():
            continue
        sources = operands(node)
        if not any(_source(n) in weights and len(n.meta["dims"][0]) > 1 for n in sources):
            continue
        block = node.meta.get("block", "")
        if P in strategy.outs:
            _add_pair(found[block], "forward", scattered)
        elif values(node) and isinstance(strategy.outs[0], Dim):
            inputs |= {(block, _source(n)) for n in sources if _source(n) in passed}
    for block, _ in inputs:
        _add_pair(found[block], "backward", scattered)
    return dict(found)


def _add_pair(counts: Counter[tuple[str, str]], direction: str, scattered: bool) -> None:
    if not scattered:
        counts[direction, "all_reduce"] += 1
    elif direction == "forward":
        counts["forward", "reduce_scatter"] += 1
        counts["backward", "all_gather"] += 1
    else:
        counts["forward", "all_gather"] += 1
        counts["backward", "reduce_scatter"] += 1
