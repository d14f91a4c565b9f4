"""Which products may be split as one, and which sums are several weights in one."""

from collections.abc import Collection

from tpcompile.dims import Atoms, Dim, MaybeDim


def has_sum_beyond(dim: Dim, inner: Collection[Dim]) -> bool:
    """Whether a dim has a sum in it of more than `inner`: the segments of a fused weight."""
    root = dim.root()
    if root.terms is not None and not Atoms().leaves(root) <= set(inner):
        return True
    return any(has_sum_beyond(part, inner) for part in root.factors or root.terms or ())


def units_in(dim: MaybeDim, degree: int) -> set[Dim]:
    """Products anywhere in a dim that `degree` ranks can share although none of their leaves can.

    >>> from tpcompile.dims import composite
    >>> kv, each, d = Dim(8), Dim(4), Dim(128)
    >>> heads = composite([kv, each], product=True)
    >>> units_in(composite([heads, d], product=True), 16) == {heads}
    True
    """
    if dim is None:
        return set()
    root = dim.root()
    found = {each for part in root.factors or root.terms or () for each in units_in(part, degree)}
    small = root.factors is not None and all(leaf.size < degree for leaf in Atoms().leaves(root))
    return found | ({root} if small and root.size >= degree else set())
