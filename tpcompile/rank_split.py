"""What splitting factors of a rule means on one rank, in plain ints."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from tpcompile.layout import Segments, share, start
from tpcompile.rule import DimSpec, Rule, Spec


def split_together(rule: Rule, factor: str) -> frozenset[str]:
    """The factor and those that any sum of terms forces to be split with it; empty if none can."""
    found = {factor}
    dims = {dim for spec in (*rule.ins, *rule.outs) for dim in spec if len(dim) > 1}
    grown = True
    while grown:
        grown = False
        for dim in dims:
            if not found.intersection(name for term in dim for name in term):
                continue
            for term in dim:
                if found.intersection(term):
                    continue
                free = [name for name in term if name not in rule.whole]
                if not free:
                    return frozenset()
                found.add(free[0])
                grown = True
    return frozenset() if found & rule.whole else frozenset(found)


@dataclass(frozen=True)
class RankSplit:
    """One rank's view of a split; what a local rewrite asks (`rule.Split`)."""

    axis: tuple[str, int, int]
    sizes: Mapping[str, int]
    factors: frozenset[str]

    def on(self, rank: int) -> "RankSplit":
        """The same split, seen by another rank."""
        return replace(self, axis=(*self.axis[:2], rank))

    def is_split(self, factor: str) -> bool:
        """Whether the factor is split."""
        return factor in self.factors

    def local_size(self, factor: str) -> int:
        """Size of the factor on this rank."""
        size = self.sizes[factor]
        return share(size, self.axis[1], self.axis[2]) if self.is_split(factor) else size

    def global_size(self, factor: str) -> int:
        """Size of the factor on all ranks together."""
        return self.sizes[factor]

    def offset(self, factor: str) -> int:
        """First global index of this rank's part."""
        return start(self.sizes[factor], self.axis[1], self.axis[2])

    def length(self, spec: DimSpec) -> int:
        """Local length of a dim."""
        return sum(prod(map(self.local_size, term)) for term in spec)

    def layout(self, spec: Spec) -> tuple[int, Segments] | None:
        """(dim, segments) of the split dim of a tensor, or None."""
        for i, dim in enumerate(spec):
            if any(self.is_split(name) for term in dim for name in term):
                return i, tuple(map(self._segment, dim))
        return None

    def _segment(self, term: tuple[str, ...]) -> tuple[int, int, int]:
        at = next(i for i, name in enumerate(term) if self.is_split(name))
        before, after = (prod(self.sizes[n] for n in part) for part in (term[:at], term[at + 1 :]))
        return before, self.sizes[term[at]], after
