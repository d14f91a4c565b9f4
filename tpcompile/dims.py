"""Named dims: union-find over tensor dims that are products or sums of smaller dims.

Sizes are plain ints; a symbolic size is coded as a product of large primes (see `sizes`), so that
divisibility of the codes is divisibility of the expressions.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count, groupby
from math import prod

from tpcompile.layout import Segments

_serial = count()


class Dim:
    """One class of unified tensor dims: a leaf, a product of dims, or a sum of dims."""

    __slots__ = ("factors", "name", "parent", "rivals", "serial", "size", "terms")

    def __init__(self, size: int) -> None:
        self.size = size
        self.serial = next(_serial)
        """Order of creation: sets of dims are walked in it, so that all ranks plan alike."""
        self.parent: Dim | None = None
        self.factors: list[Dim] | None = None
        """Product, major first."""
        self.terms: list[Dim] | None = None
        """Sum, in order."""
        self.name = ""
        self.rivals: set[Dim] = set()
        """Dims this one must stay apart from: the other dims of a weight matrix."""

    def root(self) -> "Dim":
        """The representative of this dim's class."""
        node = self
        while node.parent is not None:
            if node.parent.parent is not None:
                node.parent = node.parent.parent
            node = node.parent
        return node

    def is_leaf(self) -> bool:
        """Whether the dim is not known to be a product or a sum. Only asked of roots."""
        return self.factors is None and self.terms is None

    def __repr__(self) -> str:
        return text_of(self)


MaybeDim = Dim | None
"""None stands for a dim of size 1."""


def merge(a: Dim, b: Dim) -> bool:
    """Make two dims of one size the same dim; False (and unmerged) where their parts disagree."""
    a, b = a.root(), b.root()
    if a is b:
        return True
    if a.size != b.size:
        return False
    if not a.is_leaf() and not b.is_leaf():
        if a.factors is not None and b.factors is not None:
            if not align(a.factors, b.factors):
                return False
        elif a.terms is not None and b.terms is not None:
            if not refine(a.terms, b.terms):
                return False
        else:
            return False
        a, b = a.root(), b.root()
        if a is b:
            return True
    if _are_rivals(a, b):
        return False
    if a.is_leaf() and not b.is_leaf():
        a, b = b, a
    b.parent = a
    a.name = a.name or b.name
    a.rivals |= b.rivals
    return True


def keep_apart(dims: Sequence[Dim]) -> None:
    """Never unify these: one name on two dims of a weight would leave it with no dim to split."""
    for dim in dims:
        dim.rivals.update(d for d in dims if d is not dim)


def _are_rivals(a: Dim, b: Dim) -> bool:
    fewer, other = (a, b) if len(a.rivals) <= len(b.rivals) else (b, a)
    return any(rival.root() is other for rival in fewer.rivals)


def align(xs: Sequence[Dim], ys: Sequence[Dim]) -> bool:
    """Unify two products of equal size from the minor side, splitting dims where sizes nest."""
    left, right = list(xs), list(ys)
    while left and right:
        x, y = left[-1].root(), right[-1].root()
        if x is y or (x.size == y.size and merge(x, y)):
            left.pop()
            right.pop()
        elif x.size < y.size:
            if not _peel(right, y, x, left, product=True):
                return False
        elif x.size > y.size:
            if not _peel(left, x, y, right, product=True):
                return False
        else:
            return False
    return not left and not right


def refine(xs: Sequence[Dim], ys: Sequence[Dim]) -> bool:
    """Unify two sums of equal size from the first term on, splitting terms at each other's cuts."""
    left, right = list(reversed(xs)), list(reversed(ys))
    while left and right:
        x, y = left[-1].root(), right[-1].root()
        if x is y or (x.size == y.size and merge(x, y)):
            left.pop()
            right.pop()
        elif x.size < y.size:
            if not _peel(right, y, x, left, product=False):
                return False
        elif x.size > y.size:
            if not _peel(left, x, y, right, product=False):
                return False
        else:
            return False
    return not left and not right


def _peel(stack: list[Dim], big: Dim, small: Dim, other: list[Dim], *, product: bool) -> bool:
    """Open `big` (on top of `stack`) so that its last factor, or first term, can meet `small`."""
    parts = big.factors if product else big.terms
    if parts is not None:
        stack.pop()
        stack.extend(parts if product else reversed(parts))
        return True
    if not big.is_leaf() or (product and big.size % small.size):
        inner = small.factors if product else small.terms
        if inner is None:
            return False
        other.pop()
        other.extend(inner if product else reversed(inner))
        return True
    if product:
        big.factors = [Dim(big.size // small.size), small]
    else:
        big.terms = [small, Dim(big.size - small.size)]
    return True


def decompose(dim: Dim, parts: Sequence[Dim], *, product: bool) -> bool:
    """State that `dim` is the product (or sum) of `parts`; False where that cannot be."""
    dim = dim.root()
    if len(parts) == 1:
        return merge(dim, parts[0])
    if dim.is_leaf():
        if product:
            dim.factors = list(parts)
        else:
            dim.terms = list(parts)
        return True
    known = dim.factors if product else dim.terms
    if known is None:
        return False
    return align(known, parts) if product else refine(known, parts)


def composite(parts: Sequence[Dim], *, product: bool) -> MaybeDim:
    """The dim that is the product (or sum) of parts; None for an empty product."""
    if len(parts) <= 1:
        return parts[0] if parts else None
    total = prod(p.size for p in parts) if product else sum(p.size for p in parts)
    dim = Dim(total)
    decompose(dim, parts, product=product)
    return dim


class Atoms:
    """Which leaves can split a dim, and how; memoised once naming is complete.

    A product in `units` (8 kv heads of 4 queries, on 16 ranks) may be split as if it were a leaf.
    """

    def __init__(self, units: Collection[Dim] = ()) -> None:
        self.units = frozenset(units)
        self._atoms: dict[Dim, frozenset[Dim]] = {}
        self._leaves: dict[Dim, frozenset[Dim]] = {}

    def splitting(self, dim: MaybeDim) -> frozenset[Dim]:
        """Leaves by which every part of the dim can be dealt out."""
        if dim is None:
            return frozenset()
        root = dim.root()
        if root not in self._atoms:
            self._atoms[root] = self._splitting(root)
        return self._atoms[root]

    def _splitting(self, root: Dim) -> frozenset[Dim]:
        if root.factors is not None:
            seen: set[Dim] = set()
            twice: set[Dim] = set()
            for factor in root.factors:
                inside = self.leaves(factor)
                twice |= seen & inside
                seen |= inside
            ways = frozenset[Dim]().union(*(self.splitting(f) for f in root.factors))
            return (ways - twice) | (self.units & {root})
        if root.terms is not None:
            return frozenset.intersection(*(self.splitting(term) for term in root.terms))
        return frozenset((root,))

    def leaves(self, dim: MaybeDim) -> frozenset[Dim]:
        """All leaves and units anywhere in the dim."""
        if dim is None:
            return frozenset()
        root = dim.root()
        if root not in self._leaves:
            parts = root.factors or root.terms
            self._leaves[root] = (
                frozenset[Dim]().union(self.units & {root}, *(self.leaves(p) for p in parts))
                if parts
                else frozenset((root,))
            )
        return self._leaves[root]

    def torn(self, dim: MaybeDim) -> frozenset[Dim]:
        """Units of which the dim has parts, but not the whole."""
        inside = self.leaves(dim)
        return frozenset(u for u in self.units - inside if inside & self.leaves(u))


def ordered(dims: Iterable[Dim]) -> list[Dim]:
    """Dims in order of creation."""
    return sorted(dims, key=lambda d: d.serial)


def segments_of(dim: Dim, atom: Dim) -> Segments:
    """How `dim` is dealt out when `atom` is; sizes are codes.

    >>> h, d = Dim(4), Dim(16)
    >>> segments_of(composite([h, d], product=True), h)
    ((1, 4, 16),)
    """
    root = dim.root()
    if root is atom:
        return ((1, root.size, 1),)
    if root.terms is not None:
        return tuple(s for term in root.terms for s in segments_of(term, atom))
    factors = [f.root() for f in root.factors or ()]
    place = next(i for i, f in enumerate(factors) if contains(f, atom))
    outer = prod(f.size for f in factors[:place])
    inner = prod(f.size for f in factors[place + 1 :])
    parts = segments_of(factors[place], atom)
    if len(parts) == 1:
        (o, u, i) = parts[0]
        return ((outer * o, u, i * inner),)
    return tuple((o, u, i * inner) for o, u, i in parts) * outer


def contains(dim: Dim, atom: Dim) -> bool:
    """Whether `atom` is the dim or anywhere in it."""
    root = dim.root()
    parts = root.factors or root.terms or ()
    return root is atom or any(contains(p, atom) for p in parts)


def plain_name(dim: Dim) -> str:
    """The dim's name, or its size where it has none."""
    return dim.name or str(dim.size)


def text_of(dim: MaybeDim, named: Callable[[Dim], str] = plain_name) -> str:
    """Readable form: `heads*head_dim`, `q+k+v`, `2*ffn`, `1`; `named` writes a dim with a name."""
    if dim is None:
        return "1"
    root = dim.root()
    if root.name or root.is_leaf():
        return named(root)
    if root.factors is not None:
        inner = [text_of(f, named) for f in root.factors]
        return "*".join(f"({t})" if "+" in t else t for t in inner)
    runs = [(t, len(list(run))) for t, run in groupby(text_of(t, named) for t in root.terms or ())]
    return "+".join(f"{n}*{t}" if n > 1 else t for t, n in runs)
