"""Sizes and traffic as sympy expressions in b, s, hidden, ffn, heads, vocab and t."""

from collections.abc import Iterable
from typing import Any

import sympy

from tpcompile.dims import Dim, MaybeDim
from tpcompile.sizes import Sizes

T = sympy.Symbol("t", positive=True, integer=True)
"""The degree."""
_SHORT = {"batch": "b", "seq": "s"}

VOLUME: dict[str, Any] = {
    "all_reduce": 2 * ((T - 1) / T),
    "all_gather": (T - 1) / T,
    "reduce_scatter": (T - 1) / T,
    "all_to_all": (T - 1) / T**2,
}
"""Collective -> what each rank sends in a ring, per byte of the whole value (Thakur, Rabenseifner,
Gropp 2005, section 4)."""


class Symbols:
    """Named dims as sympy symbols: of blocks alike, the same letter.

    >>> dim = Dim(4); dim.name = "layers.3.ffn"
    >>> symbols = Symbols(Sizes({}), 2)
    >>> symbols.size((dim, dim)), symbols.values
    (ffn**2, {t: 2, ffn: 4})
    """

    def __init__(self, sizes: Sizes, degree: int) -> None:
        self.sizes = sizes
        self.values: dict[Any, int] = {T: degree}
        """Symbol -> its size in the example."""
        self._symbols: dict[tuple[str, int], Any] = {}
        self._dims: dict[Dim, Any] = {}

    def dim(self, dim: MaybeDim) -> Any:
        """A dim as an expression."""
        if dim is None:
            return sympy.Integer(1)
        root = dim.root()
        if root not in self._dims:
            self._dims[root] = self._expression(root)
        return self._dims[root]

    def _expression(self, root: Dim) -> Any:
        if root.factors is not None:
            return sympy.Mul(*map(self.dim, root.factors))
        if root.terms is not None:
            return sympy.Add(*map(self.dim, root.terms))
        if not root.name:
            size = self.sizes.expr(root.size)
            return sympy.Integer(size) if isinstance(size, int) else size
        return self._symbol(root)

    def _symbol(self, leaf: Dim) -> Any:
        short = leaf.name.rpartition(".")[2]
        short = _SHORT.get(short, short if short.isidentifier() else "n")
        size = self.sizes.hint(leaf.size)
        if (short, size) not in self._symbols:
            taken = sum(name == short for name, _ in self._symbols)
            name = f"{short}{taken + 1}" if taken else short
            symbol = sympy.Symbol(name, positive=True, integer=True)
            self._symbols[short, size] = symbol
            self.values[symbol] = size
        return self._symbols[short, size]

    def size(self, dims: Iterable[MaybeDim]) -> Any:
        """Elements of a tensor."""
        return sympy.Mul(*map(self.dim, dims))

    def value(self, expression: Any) -> float:
        """An expression at the example's sizes."""
        return float(expression.subs(self.values))


def bytes_text(nbytes: float) -> str:
    """Bytes for people.

    >>> bytes_text(1536), bytes_text(80 * 2**30)
    ('1.5 KiB', '80.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def seconds_text(seconds: float) -> str:
    """Seconds for people.

    >>> seconds_text(0.00234), seconds_text(12.5)
    ('2.34 ms', '12.5 s')
    """
    if abs(seconds) >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if abs(seconds) >= 1e-3 else f"{seconds * 1e6:.3g} us"
