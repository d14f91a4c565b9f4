"""Why a parameter, an op or a collective of a plan is what it is: asked of the solver again."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from tpcompile.alternatives import Difference, forced, unpinned
from tpcompile.dims import Dim, contains, ordered, text_of
from tpcompile.errors import InputError
from tpcompile.placement import R, State, state_text
from tpcompile.problem import Assignment, Problem
from tpcompile.program import Program, operands, values
from tpcompile.reasons import blocked, op_text, readers, refusal, unsplit
from tpcompile.strategies import Strategy

_LONGEST_CHAIN = 12


@dataclass(frozen=True)
class Alternative:
    """What could have been instead."""

    text: str
    extra: Difference | None
    """Of the cheapest plan with it over the chosen one; None where there is none."""
    reason: str
    """Why it lost."""


@dataclass(frozen=True)
class Reason:
    """The answer to `why`; `print` it."""

    name: str
    choice: str
    chain: tuple[str, ...]
    """Ops that are split by the same named dim, in order: they had to be decided together."""
    alternatives: tuple[Alternative, ...]
    removed: tuple[str, ...] = ()
    """Collectives beside it that `eliminate_redundant` took away."""

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.choice}"]
        lines += [f"  tied to: {each}" for each in self.chain]
        lines += [f"  not {a.text}: {a.reason}" for a in self.alternatives]
        lines += [f"  removed by eliminate_redundant: {each}" for each in self.removed]
        return "\n".join(lines)


def why(program: Program, name: str) -> Reason:
    """Why the parameter, op or collective of this name is placed as it is.

    Raises:
        InputError: The planned program has nothing of that name.
    """
    node = _find(program, name)
    plan: Assignment = program.extra["assignment"]
    if node in plan.parameters:
        return _of_parameter(program, node, program.leaves[node.name].name)
    if "conversion" in node.meta:
        return _of_collective(program, node)
    if node in plan.strategies:
        return _of_op(program, node)
    reason = refusal(node, None, plan.choices)
    return Reason(
        name, f"R: {reason or 'it depends on no parameter, and splitting is free'}", (), ()
    )


def _find(program: Program, name: str) -> fx.Node:
    first = {each: names[0] for names in program.aliases.values() for each in names}
    wanted = first.get(name, name.removeprefix("%"))
    known: dict[str, fx.Node] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            known[program.leaves[node.name].name] = node
        elif node.op == "call_function":
            known[node.name] = node
    if wanted not in known:
        close = difflib.get_close_matches(wanted, known, 3, 0.4)
        raise InputError(
            f"why({name!r}).",
            "the plan has no parameter, op or collective of that name.",
            f"did you mean {', '.join(close)}?" if close else "see the tables of explain for names",
        )
    return known[wanted]


def _of_parameter(program: Program, node: fx.Node, name: str) -> Reason:
    plan: Assignment = program.extra["assignment"]
    problem, chosen = plan.problem, plan.parameters[node]
    twin = _twin(problem, node)
    found = []
    for i, state in enumerate(problem.states[twin]):
        if state != chosen:
            extra = forced(plan, twin, i)
            pinned = name in problem.pinned and state not in problem.kept(name)
            found.append(_parameter_alternative(problem, twin, state, extra, pinned))
    for i, dim in enumerate(node.meta["dims"][0]):
        reason = unsplit(node, dim, plan.choices)
        if reason:
            found.append(Alternative(f"Shard({i})", None, reason))
    choice = state_text(chosen)
    if name in problem.pinned:
        price = unpinned(plan, [name])
        choice += f", pinned by plan= as {problem.pins[name].text}: {price}"
    return Reason(name, choice, _chain(program, chosen), tuple(found), _removed(program, node))


def _parameter_alternative(
    problem: Problem, node: fx.Node, state: State, extra: Difference | None, pinned: bool
) -> Alternative:
    text = state_text(state)
    if pinned:
        return Alternative(text, extra, "plan= pins it elsewhere")
    if extra is None:
        reason = blocked(problem, node, state) or "no op that reads it can run with it"
        return Alternative(text, None, reason)
    return Alternative(text, extra, str(extra))


def _of_op(program: Program, node: fx.Node) -> Reason:
    plan: Assignment = program.extra["assignment"]
    chosen = plan.strategies[node]
    found = [*_op_alternatives(plan, node), *_refused(plan, node)]
    choice = f"{op_text(node)}: {_strategy_text(chosen)}"
    chain = _chain(program, chosen.split or R)
    return Reason(node.name, choice, chain, tuple(found), _removed(program, node))


def _op_alternatives(plan: Assignment, node: fx.Node) -> Iterator[Alternative]:
    twin, chosen = _twin(plan.problem, node), plan.strategies[node]
    for i, strategy in enumerate(plan.problem.strategies[twin]):
        if strategy is chosen:
            continue
        extra = forced(plan, twin, i)
        reason = "its operands or readers cannot be had so" if extra is None else str(extra)
        yield Alternative(_strategy_text(strategy), extra, reason)


def _refused(plan: Assignment, node: fx.Node) -> Iterator[Alternative]:
    dims = [d for n in operands(node) for d in n.meta["dims"][0]]
    dims += [d for each in node.meta["dims"] for d in each]
    leaves = {leaf for dim in dims for leaf in plan.choices.atoms.leaves(dim)}
    for leaf in ordered(leaves):
        reason = refusal(node, leaf, plan.choices)
        if reason:
            yield Alternative(f"split by {text_of(leaf)}", None, reason)


def _of_collective(program: Program, node: fx.Node) -> Reason:
    plan: Assignment = program.extra["assignment"]
    what = node.meta["conversion"]
    source = node
    while "conversion" in source.meta:
        (source,) = operands(source)
    giver = program.leaves[source.name].name if source.op == "placeholder" else op_text(source)
    users = ", ".join(dict.fromkeys(map(op_text, readers(plan.problem, node)))) or "the output"
    sends = "; ".join(
        f"{kind} {direction}"
        for kind, direction in ((what.step.forward, "forward"), (what.step.backward, "backward"))
        if kind
    )
    choice = (
        f"{sends or 'no traffic'}, because {giver} gives {state_text(what.have)} and {users} "
        f"needs {state_text(what.need)}"
    )
    found: list[Alternative] = []
    for op in (source, *readers(plan.problem, node)[:1]):
        if op in plan.strategies:
            found += [
                Alternative(f"{op_text(op)} as {a.text}", a.extra, a.reason)
                for a in _op_alternatives(plan, op)
            ]
    return Reason(node.name, choice, (), tuple(found), _removed(program, node))


def _twin(problem: Problem, node: fx.Node) -> fx.Node:
    """The node of the program that was solved; the explained one may be a copy of it."""
    if node in problem.variable:
        return node
    return next(n for n in problem.variable if n.name == node.name)


def _strategy_text(strategy: Strategy) -> str:
    if strategy.split is not None:
        return f"split by {text_of(strategy.split)}"
    return {
        "replicate": "replicated",
        "star": "replicated, with partial gradients passed through",
        "partial": "partial sums passed through",
    }[strategy.kind]


def _chain(program: Program, state: State) -> tuple[str, ...]:
    """Ops split by a named dim, by module in the order of the graph."""
    if not isinstance(state, Dim):
        return ()
    plan: Assignment = program.extra["assignment"]
    modules: dict[str, list[str]] = {}
    for node, strategy in plan.strategies.items():
        if strategy.split is state:
            text = op_text(node).partition(" in ")[0] + _role(node, state)
            modules.setdefault(node.meta.get("path", ""), []).append(text)
    texts = [
        f"{', '.join(dict.fromkeys(ops))} in {path or 'the root'}" for path, ops in modules.items()
    ]
    if len(texts) <= _LONGEST_CHAIN:
        return tuple(texts)
    return (*texts[:_LONGEST_CHAIN], f"and {len(texts) - _LONGEST_CHAIN} modules more")


def _role(node: fx.Node, atom: Dim) -> str:
    has_in = any(
        d is not None and contains(d, atom) for n in operands(node) for d in n.meta["dims"][0]
    )
    has_out = any(
        d is not None and contains(d, atom)
        for dims in node.meta["dims"][: len(values(node))]
        for d in dims
    )
    if has_in and not has_out:
        return f" (sums over {text_of(atom)})"
    return ""


def _removed(program: Program, node: fx.Node) -> tuple[str, ...]:
    """What was taken away at a node or at the conversions around it."""
    near = {node.name, *(u.name for u in node.users), *(n.name for n in node.all_input_nodes)}
    return tuple(
        line
        for line in program.extra.get("removed", ())
        if any(word.strip(":,%") in near for word in line.split())
    )
