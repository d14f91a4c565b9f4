"""The text form of a program: one line a node, stable between runs."""

from torch import Tensor, fx

from tpcompile.dims import text_of
from tpcompile.placement import state_text
from tpcompile.program import Program, values


def dump(program: Program) -> str:
    """One line a node: value, dtype and shape, placement, op, module path."""
    lines = []
    for node in program.graph.nodes:
        if node.op == "output":
            lines.append(f"return {_args(node.args)}")
        else:
            lines.append(_line(node, program))
    return "\n".join(lines) + "\n"


def _line(node: fx.Node, program: Program) -> str:
    head = f"%{node.name} : {_type(node)}"
    state = _state(node, program)
    if state:
        head += f" {state}"
    if node.op == "placeholder":
        leaf = program.leaves[node.name]
        return f"{head} = {leaf.kind} {leaf.name}"
    args = _args((*node.args, *(f"{k}={_arg(v)}" for k, v in node.kwargs.items())))
    path = node.meta.get("path", "")
    return f"{head} = {_target(node)}({args})" + (f"  # {path}" if path else "")


def _type(node: fx.Node) -> str:
    vals = values(node)
    dims = node.meta.get("dims")
    if not vals:
        return "int"
    shapes = []
    for i, val in enumerate(vals):
        names = [text_of(d) for d in dims[i]] if dims else [str(s) for s in val.shape]
        shapes.append(f"{_dtype(val)}[{', '.join(names)}]")
    return ", ".join(shapes)


def _dtype(val: Tensor) -> str:
    short = {"float": "f", "bfloat": "bf", "int": "i", "complex": "c", "bool": "b8", "uint": "u"}
    name = str(val.dtype).removeprefix("torch.")
    stem = name.rstrip("0123456789")
    return short.get(stem, stem) + name[len(stem) :]


def _state(node: fx.Node, program: Program) -> str:
    plan = program.extra.get("assignment")
    if plan is None:
        return ""
    if "conversion" in node.meta:
        return state_text(node.meta["conversion"].need)
    if node in plan.parameters:
        return state_text(plan.parameters[node])
    if node in plan.strategies:
        return " ".join(state_text(s) for s in plan.strategies[node].outs)
    return "R"


def _target(node: fx.Node) -> str:
    target = node.target
    name = str(target) if hasattr(target, "overloadpacket") else getattr(target, "__name__", "")
    return name.removeprefix("aten.").removesuffix(".default")


def _args(args: tuple[object, ...]) -> str:
    return ", ".join(map(_arg, args))


def _arg(arg: object) -> str:
    if isinstance(arg, fx.Node):
        return f"%{arg.name}"
    if isinstance(arg, (list, tuple)):
        inner = ", ".join(map(_arg, arg))
        return f"[{inner}]" if isinstance(arg, list) else f"({inner})"
    return arg if isinstance(arg, str) else repr(arg)
