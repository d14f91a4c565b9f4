"""Why an op cannot split a named dim, and why a parameter is not split, in words."""

from collections.abc import Collection

from torch import fx

from tpcompile.cost import bytes_of
from tpcompile.dims import Dim, MaybeDim, contains, ordered, text_of
from tpcompile.formulas import bytes_text
from tpcompile.ops.replicated import reason_for
from tpcompile.placement import R, State, state_text
from tpcompile.problem import Assignment, Problem
from tpcompile.program import Program, operands
from tpcompile.readers import value_of
from tpcompile.strategies import Choices


def op_text(node: fx.Node) -> str:
    """An op and the module it is in: `linear in layers.0.mlp.up`."""
    name = str(getattr(node.target, "overloadpacket", getattr(node.target, "__name__", "")))
    path = node.meta.get("path", "")
    return f"{name.removeprefix('aten.')} in {path}" if path else name.removeprefix("aten.")


def refusal(node: fx.Node, atom: Dim | None, choices: Choices) -> str:
    """Why a call cannot be split along a named dim, "" where it can."""
    rule = node.meta.get("rule")
    if rule is None:
        return f"it runs whole on every rank: {reason_for(node.target)}"
    if atom is None:
        return ""
    if choices.unusable(atom):
        return choices.unusable(atom)
    in_dims = [n.meta["dims"][0] for n in operands(node)]
    out_dims = node.meta["dims"]
    tensors = [*in_dims, *out_dims]
    having = [[d for d in dims if d is not None and contains(d, atom)] for dims in tensors]
    name = text_of(atom)
    if not any(having):
        return f"it does not have {name}"
    if atom in choices.candidates(node, rule, in_dims, out_dims):
        return ""
    if any(len(found) > 1 for found in having):
        return f"{name} is two dims of one tensor"
    for found in having:
        for dim in found:
            if atom not in choices.atoms.splitting(dim):
                return f"{text_of(dim)} cannot be dealt out by {name}"
    return _by_rule(node, atom, choices)


def _by_rule(node: fx.Node, atom: Dim, choices: Choices) -> str:
    rule, bound, name = node.meta["rule"], node.meta["bound"], text_of(atom)
    if any(contains(dim, atom) for dim in node.meta["conflicts"]):
        return f"its operands part {name} in different ways"
    for factors, why in (
        (rule.whole, f"it needs {name} whole"),
        (rule.plain, f"it needs contiguous chunks of {name}"),
    ):
        if any(f in bound and contains(bound[f], atom) for f in factors):
            return why
    if atom in choices.unnatural(node, rule):
        return _unnatural(node, atom, choices)
    if atom in choices.widths:
        return f"{name}, the width of the residual stream, is split by linear layers only"
    if atom not in choices.weights:
        return f"{name} is in no weight matrix, and only sequence parallelism splits such a dim"
    return f"{name} occurs in several of its dims"


def _unnatural(node: fx.Node, atom: Dim, choices: Choices) -> str:
    if node in choices.facts.selecting:
        return "it feeds a selection (top-k or sort), which all ranks must make alike"
    if atom in choices.widths:
        return (
            f"{text_of(atom)} is the width of the residual stream, which is whole where it is read"
        )
    return f"attention needs {text_of(atom)} whole; its heads are what is split"


def unsplit(node: fx.Node, dim: MaybeDim, choices: Choices) -> str:
    """Why a parameter cannot be split along one of its dims at all, "" where it could."""
    if dim is None:
        return "it has one element"
    dims = node.meta["dims"][0]
    reasons = []
    for atom in ordered(choices.atoms.leaves(dim)):
        if choices.unusable(atom):
            reasons.append(f"{text_of(atom)}: {choices.unusable(atom)}")
        elif atom not in choices.atoms.splitting(dim):
            reasons.append(f"{text_of(dim)} cannot be dealt out by {text_of(atom)}")
        elif any(d is not dim and d is not None and contains(d, atom) for d in dims):
            reasons.append(f"{text_of(atom)} is two dims of it")
        elif atom not in choices.weights:
            reasons.append(f"{text_of(atom)} is in no weight matrix")
        else:
            return ""
    return "; ".join(dict.fromkeys(reasons))


def readers(problem: Problem, node: fx.Node) -> list[fx.Node]:
    """Calls that read a value, also by way of a conversion."""
    found: list[fx.Node] = []
    for user in node.users:
        found += readers(problem, user) if "conversion" in user.meta else [user]
    return [user for user in dict.fromkeys(found) if user.op == "call_function"]


def blocked(problem: Problem, node: fx.Node, state: State) -> str:
    """Why a parameter cannot be in a state although it could be stored so, "" if it can."""
    for user in readers(problem, node):
        if user not in problem.strategies:
            continue
        slots = [i for i, n in enumerate(operands(user)) if value_of(n)[0] is node]
        needs = {s.ins[i] for s in problem.strategies[user] for i in slots}
        if state in needs or (state == R and needs):
            continue
        if isinstance(state, Dim):
            return f"{op_text(user)} refuses {state_text(state)}: " + (
                refusal(user, state, problem.choices) or "no way to run it takes that"
            )
    return ""


def conflict(problem: Problem, pinned: Collection[str]) -> str:
    """Why pins cannot be met: the op that refuses one, or that they do not go together."""
    nodes = {
        problem.program.leaves[n.name].name: n for n in problem.states if n.op == "placeholder"
    }
    for name in pinned:
        node = nodes[name]
        kept = problem.kept(name)
        whys = [blocked(problem, node, state) for state in kept]
        if all(whys):
            return "; ".join(dict.fromkeys(whys))
    if len(pinned) == 1:
        (name,) = pinned
        users = ", ".join(op_text(u) for u in readers(problem, nodes[name]))
        states = " or ".join(map(state_text, problem.kept(name)))
        return f"a weight is never gathered at run time, and {users} cannot run with it as {states}"
    first = nodes[next(iter(pinned))]
    users = ", ".join(op_text(u) for u in readers(problem, first))
    return f"each can be met alone, but not all of them; they meet at {users}"


def parameter_reason(program: Program, node: fx.Node, style: str) -> str:
    """Why a parameter is placed as it is, in a few words."""
    plan: Assignment = program.extra["assignment"]
    state = plan.parameters[node]
    if isinstance(state, Dim):
        name = state.name or text_of(state)
        return {
            "column": f"makes {name}",
            "row": f"sums over {name}",
            "vocab": f"rows of {name}",
        }.get(style, f"is read by parts of {name}")
    return _whole_reason(plan, node)


def _whole_reason(plan: Assignment, node: fx.Node) -> str:
    """Why a parameter is replicated."""
    val, choices = node.meta["val"], plan.choices
    if choices.cost.size == 1:
        return "there is one rank"
    if not node.users:
        return "the forward does not read it"
    bare = [u for u in readers(plan.problem, node) if u.meta.get("rule") is None]
    if bare:
        return f"{op_text(bare[0])} {reason_for(bare[0].target)}"
    if val.ndim < 2:
        size = bytes_text(bytes_of(val))
        return f"no matrix: {size} on every rank, and its readers need it whole"
    reasons = [unsplit(node, dim, choices) for dim in node.meta["dims"][0]]
    if all(reasons):
        return "; ".join(dict.fromkeys(reasons))
    twin = next(n for n in plan.problem.variable if n.name == node.name)
    states = [s for s in plan.problem.states[twin] if s != R]
    whys = [blocked(plan.problem, twin, s) for s in states]
    if all(whys):
        return "; ".join(dict.fromkeys(whys))
    return "splitting it costs more than it saves"
