"""Coding of symbolic sizes as ints, so that naming dims works on ints only."""

from collections.abc import Mapping
from typing import Any

_FIRST_PRIME = 1_000_003


class Sizes:
    """Codes symbolic sizes as ints and back: each symbol is a prime of seven digits.

    An identity of size expressions that holds at such primes holds for all practical purposes
    (Schwartz-Zippel); so naming works on ints only.
    """

    def __init__(self, hints: Mapping[Any, int]) -> None:
        self.hints = dict(hints)
        """Symbol -> its example value."""
        self._prime: dict[Any, int] = {}
        self._expr: dict[int, Any] = {}
        self._code: dict[Any, int] = {}
        for symbol in hints:
            self._add(symbol)

    def _add(self, symbol: Any) -> None:
        prime = _next_prime(max(self._prime.values(), default=_FIRST_PRIME - 2) + 2)
        self._prime[symbol] = prime
        self._expr[prime] = symbol

    def code(self, size: Any) -> int:
        """The int that stands for a size (an int or a SymInt)."""
        if isinstance(size, int):
            return size
        expr = size.node.expr
        if expr not in self._code:
            for symbol in expr.free_symbols - self._prime.keys():
                self._add(symbol)  # unbacked: a size that depends on data
            value = self._code[expr] = int(expr.subs(self._prime))
            if expr.is_Add:  # products are found by division
                self._expr.setdefault(value, expr)
        return self._code[expr]

    def hint(self, code: int) -> int:
        """The example value of a coded size; 0 where it depends on data."""
        expr = self.expr(code)
        if isinstance(expr, int):
            return expr
        value = expr.subs(self.hints)
        return int(value) if value.is_Integer else 0

    def expr(self, code: int) -> Any:
        """The int or sympy expression a code stands for."""
        if code == 0:
            return 0
        left, found = code, 1
        for known, expr in self._expr.items():
            while left % known == 0:
                left //= known
                found = found * expr
        return left * found


def _next_prime(n: int) -> int:
    while any(n % d == 0 for d in range(3, int(n**0.5) + 1, 2)):
        n += 2
    return n
