"""Whether inputs of other sizes fit a captured program, as plain Python that compiles itself."""

from collections.abc import Callable, Iterator
from typing import Any

from tpcompile.program import Program

_INFIX = {
    "Add": "+",
    "Mul": "*",
    "Pow": "**",
    "PowByNatural": "**",
    "Mod": "%",
    "PythonMod": "%",
    "FloorDiv": "//",
    "CleanDiv": "//",
    "Equality": "==",
    "Unequality": "!=",
    "StrictLessThan": "<",
    "LessThan": "<=",
    "StrictGreaterThan": ">",
    "GreaterThan": ">=",
    "And": "and",
    "Or": "or",
}
"""sympy function -> Python operator; more than two operands are joined, none of them chains."""
_CALLS = {"Max": "max", "Min": "min", "Not": "not "}


def size_check(
    program: Program, degree: int = 1, dealt: tuple[Any, ...] = ()
) -> Callable[..., bool]:
    """A function of the input tensors in order: whether these sizes fit.

    Fixed dims are equal, each symbol has one value, which is not 0 or 1 (those change what ops
    mean; a cache may be of length 1), the guards are true, and `degree` divides the sizes `dealt`
    out.  It is generated because it runs before every step, and because torch.compile traces it:
    its conditions become guards on the sizes.
    """
    inputs = [node.name for node in program.placeholders("input")]
    where = {symbol: f"{name}.shape[{dim}]" for symbol, (name, dim) in program.symbols.items()}
    functions: dict[str, Any] = {"max": max, "min": min}

    def text(expr: Any) -> str:
        return python_text(expr, where, functions)

    tests = [*_shape_tests(program, where, text)]
    tests += map(text, program.guards)
    tests += [f"{text(size)} % {degree} == 0" for size in dealt]
    source = f"lambda {', '.join(inputs)}: {' and '.join(dict.fromkeys(tests)) or 'True'}"
    return eval(source, functions)


def _shape_tests(
    program: Program, where: dict[Any, str], text: Callable[[Any], str]
) -> Iterator[str]:
    shapes: dict[str, tuple[Any, ...]] = program.extra["input_shapes"]
    for name, expected in shapes.items():
        yield f"{name}.ndim == {len(expected)}"
    lengths: set[tuple[str, int]] = program.extra.get("lengths", set())
    for symbol, place in program.symbols.items():
        yield f"{where[symbol]} >= {1 if place in lengths else 2}"
    for name, expected in shapes.items():
        for dim, size in enumerate(expected):
            own = f"{name}.shape[{dim}]"
            if text(size) != own:
                yield f"{own} == {text(size)}"


def python_text(expr: Any, where: dict[Any, str], functions: dict[str, Any]) -> str:
    """Python text of an int or sympy expression; functions without an operator are collected."""
    if expr in where:
        return where[expr]
    name = type(expr).__name__
    operands = [python_text(arg, where, functions) for arg in getattr(expr, "args", ())]
    if not operands:
        return {"BooleanTrue": "True", "BooleanFalse": "False"}.get(name, str(expr))
    if name in _INFIX:
        return f"({f' {_INFIX[name]} '.join(operands)})"
    if name not in _CALLS:
        functions[name] = expr.func
    return f"{_CALLS.get(name, name)}({', '.join(operands)})"
