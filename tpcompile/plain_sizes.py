"""Write sizes as sums of products where the capture has `Max`, `Min` or a division in them.

Naming dims can code nothing else.  A maximum is one of its operands as long as that is the larger:
the captured program gets a guard for it, and another is captured where it does not hold.
"""

from typing import Any

import sympy
import torch
from torch import Tensor

from .program import Program, is_dynamic
from .torch_private import sym_expr, sym_int


def write_plain_sizes(program: Program) -> bool:
    """Rewrite the sizes of all values; whether all are sums of products now."""
    writer = _Writer(program)
    for node in program.graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, (list, tuple)):
            node.meta["val"] = type(val)(map(writer.value, val))
        elif val is not None:
            node.meta["val"] = writer.value(val)
    known = set(program.guards)
    program.guards += [guard for guard in writer.guards if guard not in known]
    return writer.is_plain


class _Writer:
    def __init__(self, program: Program) -> None:
        self.mode = program.extra["fake_mode"]
        self.hints = example_sizes(program)
        self.guards: dict[Any, None] = {}
        self.is_plain = True

    def value(self, val: Any) -> Any:
        """A value of the same type with plain sizes."""
        if isinstance(val, torch.SymInt):
            return self.size(val)
        if not isinstance(val, Tensor):
            return val
        sizes = [self.size(size) for size in val.shape]
        if all(new is old for new, old in zip(sizes, val.shape, strict=True)):
            return val
        strides = [self.size(stride) for stride in val.stride()]
        with self.mode:
            new = torch.empty_strided(sizes, strides, dtype=val.dtype, device=val.device)
        return new.requires_grad_(val.requires_grad)

    def size(self, size: Any) -> Any:
        """A plain size; the size itself where it is plain or cannot be."""
        if not is_dynamic(size):
            return size
        expr = sym_expr(size)
        if expr.is_polynomial():
            return size
        new = self._plain(expr)
        if not new.is_polynomial():
            self.is_plain = False
            return size
        return int(new) if new.is_Integer else sym_int(self.mode, new, int(new.subs(self.hints)))

    def _plain(self, expr: Any) -> Any:
        if not expr.args:
            return expr
        operands = [self._plain(arg) for arg in expr.args]
        kind = type(expr).__name__
        if kind in ("Max", "Min") and expr.free_symbols <= self.hints.keys():
            pick = (max if kind == "Max" else min)(operands, key=lambda o: o.subs(self.hints))
            for other in operands:
                holds = sympy.Ge(pick, other) if kind == "Max" else sympy.Le(pick, other)
                if holds != True:  # noqa: E712 (sympy)
                    self.guards[holds] = None
            return pick
        if kind in ("FloorDiv", "CleanDiv"):
            quotient = sympy.cancel(operands[0] / operands[1])
            if quotient.is_number:
                return quotient if quotient.is_integer else expr.func(*operands)
            numbers = sympy.Poly(quotient).coeffs() if quotient.is_polynomial() else ()
            if numbers and all(number.is_integer for number in numbers):
                return quotient
        return expr.func(*operands)


def example_sizes(program: Program) -> dict[Any, int]:
    """Symbol -> its value in the example that was captured."""
    inputs = {node.name: node.meta["val"] for node in program.placeholders("input")}
    places = program.symbols.items()
    return {symbol: int(inputs[name].shape[dim].node.hint) for symbol, (name, dim) in places}
