"""Rules: what an op means for sharding, as an equation over factors.

`"b s k, n k -> b s n"` says which dims of the operands and outputs are one factor.  Splitting one
factor over a mesh axis splits every dim that contains it; an operand without it is needed whole;
an output without it is a partial sum.  A rule is data; nothing in it knows about ranks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

Term = tuple[str, ...]
"""A product of factors, major first; `()` is a dim of size 1 that belongs to no factor."""
DimSpec = tuple[Term, ...]
"""One tensor dim: a sum of terms (nearly always one)."""
Spec = tuple[DimSpec, ...]
"""The dims of one tensor."""


class Split(Protocol):
    """What a local rewrite may ask about the split it is localised for."""

    axis: tuple[str, int, int]
    """(group name, size, rank), as every function of `collectives` takes it."""

    def is_split(self, factor: str) -> bool:
        """Whether the factor is split over the axis."""
        ...

    def local_size(self, factor: str) -> Any:
        """Size of the factor on this rank (an int, or a graph node where it is symbolic)."""
        ...

    def global_size(self, factor: str) -> Any:
        """Size of the factor on all ranks together."""
        ...

    def offset(self, factor: str) -> Any:
        """First global index of this rank's part; only for factors the rule lists as `plain`."""
        ...

    def length(self, spec: DimSpec) -> Any:
        """Local length of a dim: the sum over its terms of the product of local sizes."""
        ...

    def layout(self, spec: Spec) -> tuple[int, tuple[tuple[Any, Any, Any], ...]] | None:
        """(dim, segments) of the split dim of a tensor with these dims, or None."""
        ...


Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
Local = Callable[..., Call]
"""`local(split, *args, **kwargs)` -> (target, args, kwargs): the call to make on one rank's pieces.

The arguments are the op's own, its tensors already local (graph nodes, or tensors in the rule
test).  Called only when a factor of the op is split.
"""


@dataclass(frozen=True)
class Rule:
    """One op's equation and what restricts splitting it."""

    ins: tuple[Spec, ...]
    """One per tensor operand, lists flattened, in argument order."""
    outs: tuple[Spec, ...]
    """One per tensor output."""
    whole: frozenset[str] = frozenset()
    """Factors that may not be split at this op."""
    plain: frozenset[str] = frozenset()
    """Factors that may be split only in contiguous chunks (the rewrite needs an offset)."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of factors that are not a dim by themselves."""
    linear: tuple[tuple[int, ...], ...] = ()
    """Groups of operands in which the op is linear: all Partial in, Partial out."""
    inner: frozenset[str] = frozenset()
    """Factors whose reduction the local rewrite does itself: the output is replicated."""
    local: Local | None = None
    """How to call the op on local pieces; None: the same call."""

    @classmethod
    def parse(cls, text: str, **fields: Any) -> "Rule":
        """A rule from an equation.

        Operands are parted by commas, dims by blanks, `1` is a size-one dim, `(a b)` a product,
        `(a + b)` a sum, `.` a tensor without dims.  `whole` and the other sets may be given as
        strings of factor names parted by blanks.

        >>> Rule.parse("b (h d), n -> b h d, n").ins[0]
        ((('b',),), (('h', 'd'),))
        """
        for name in ("whole", "plain", "inner"):
            if isinstance(fields.get(name), str):
                fields[name] = frozenset(fields[name].split())
        left, right = text.split("->")
        return cls(_specs(left), _specs(right), **fields)

    def factors(self) -> set[str]:
        """All factor names."""
        return {f for spec in (*self.ins, *self.outs) for dim in spec for term in dim for f in term}

    def contracted(self) -> set[str]:
        """Factors of the operands that no output has."""
        return factors_of(self.ins) - factors_of(self.outs)

    def __str__(self) -> str:
        arrow = f"{', '.join(map(spec_text, self.ins))} -> {', '.join(map(spec_text, self.outs))}"
        return arrow + (f"  whole: {' '.join(sorted(self.whole))}" if self.whole else "")


def factors_of(specs: Iterable[Spec]) -> set[str]:
    """Factor names of several tensors."""
    return {f for spec in specs for dim in spec for term in dim for f in term}


def dims(*names: str) -> Spec:
    """A tensor whose dims are one factor each; `""` is a size-one dim.

    >>> dims("b", "", "s")
    ((('b',),), ((),), (('s',),))
    """
    return tuple(((name,) if name else (),) for name in names)


def spec_text(spec: Spec) -> str:
    """Equation text of one tensor."""
    return " ".join(map(_dim_text, spec)) or "."


def _dim_text(dim: DimSpec) -> str:
    terms = [" ".join(term) or "1" for term in dim]
    text = " + ".join(terms)
    return text if len(terms) == 1 and " " not in text else f"({text})"


def _specs(side: str) -> tuple[Spec, ...]:
    return tuple(_spec(part.strip()) for part in side.split(",")) if side.strip() else ()


def _spec(text: str) -> Spec:
    if text == ".":
        return ()
    out: list[DimSpec] = []
    rest = text
    while rest := rest.strip():
        if rest[0] == "(":
            inside, rest = rest[1:].split(")", 1)
            out.append(tuple(_term(term) for term in inside.split("+")))
        else:
            word, _, rest = rest.partition(" ")
            out.append((_term(word),))
    return tuple(out)


def _term(text: str) -> Term:
    return tuple(name for name in text.split() if name != "1")


RuleFn = Callable[..., Rule | None]
F = TypeVar("F", bound=RuleFn)
RULES: dict[Any, RuleFn] = {}
"""Op overload, or its name, -> rule function. The name serves libraries that register their ops
when they are imported. The function has the op's signature; tensors have .shape (ints),
.ndim and .dtype. It returns None where it has nothing to say: the op is then replicated."""
SAMPLES: dict[Any, list[Callable[[], Sequence[Any]]]] = {}
"""Op overload -> makers of example arguments, for the generic test."""


def rule(*ops: Any, samples: Sequence[Callable[[], Sequence[Any]]] = ()) -> Callable[[F], F]:
    """Register the decorated function as the rule of each op.

    An op is an overload, or the name of one that a library registers later.  A sample returns the
    op's positional arguments; a dict as last item is the keyword arguments; `check_rule` tries
    them.  Public as `tpcompile.register_rule`.
    """

    def register(fn: F) -> F:
        for op in ops:
            RULES[op] = fn
            SAMPLES[op] = list(samples)
        return fn

    return register


def rule_for(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rule | None:
    """The rule of one call, or None where the op has none (it is then replicated)."""
    fn = rule_function(op)
    return None if fn is None else fn(*args, **kwargs)


def rule_function(op: Any) -> RuleFn | None:
    """The function registered for an op, or for its name."""
    return RULES.get(op) or RULES.get(str(op))
