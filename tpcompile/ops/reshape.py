"""A reshape as an equation: the common factors of two shapes, matched from the minor side."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from tpcompile.ops.equations import local_shape
from tpcompile.rule import Call, Local, Rule, Spec, Split


def reshape_rule(source: Sequence[int], target: Sequence[int], local: Local | None) -> Rule | None:
    """The rule of `view(x, target)`; None for empty tensors.

    >>> print(reshape_rule((2, 6, 12), (12, 3, 4), None))
    f4 f3 (f2 f1) -> (f4 f3) f2 f1
    >>> print(reshape_rule((6, 4), (8, 3), None))
    f2 f1 -> f4 f3  whole: f1 f2 f3 f4
    """
    target = filled(source, target)
    # Symbolic sizes may agree only where the capture's guards hold; such a view is replicated.
    if prod(source) == 0 or prod(source) != prod(target):
        return None
    match = _Match(source, target)
    for ins, outs in _blocks(source, target):
        match.block(ins, outs)
    alone = {names[0] for names in (*match.ins, *match.outs) if len(names) == 1}
    return Rule(
        (_spec(match.ins),),
        (_spec(match.outs),),
        whole=frozenset(match.whole),
        sizes={name: size for name, size in match.sizes.items() if name not in alone},
        linear=((0,),),
        local=local,
    )


def filled(source: Sequence[int], target: Sequence[int]) -> list[int]:
    """The target shape with its -1 computed."""
    known = prod(size for size in target if size != -1)
    return [prod(source) // max(known, 1) if size == -1 else size for size in target]


def with_local_shape(target: object, out: Spec) -> Local:
    """A rewrite to `target(x, local shape)`."""

    def local(split: Split, x: object, *args: object, **kwargs: object) -> Call:
        return target, (x, local_shape(split, out)), {}  # type: ignore[return-value]

    return local


@dataclass
class _Match:
    """Factor names given so far to each dim, major first."""

    source: Sequence[int]
    target: Sequence[int]
    sizes: dict[str, int] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.ins: list[list[str]] = [[] for _ in self.source]
        self.outs: list[list[str]] = [[] for _ in self.target]

    def block(self, ins: list[int], outs: list[int]) -> None:
        """Match the dims of one block, whose products are equal; both lists minor first."""
        left, right = [self.source[i] for i in ins], [self.target[j] for j in outs]
        i = j = 0
        while i < len(ins) and j < len(outs):
            size = min(left[i], right[j])
            if max(left[i], right[j]) % size:
                break
            name = self._name(size)
            self.ins[ins[i]].insert(0, name)
            self.outs[outs[j]].insert(0, name)
            left[i], right[j] = left[i] // size, right[j] // size
            i, j = i + (left[i] == 1), j + (right[j] == 1)
        for names, places, rest in (
            (self.ins, ins[i:], left[i:]),
            (self.outs, outs[j:], right[j:]),
        ):
            for place, size in zip(places, rest, strict=True):
                names[place].insert(0, self._name(size))
                self.whole.add(names[place][0])

    def _name(self, size: int) -> str:
        name = f"f{len(self.sizes) + 1}"
        self.sizes[name] = size
        return name


def _blocks(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Smallest runs of dims with equal products, minor first; dims of size 1 are in none."""
    lefts = [i for i in reversed(range(len(source))) if source[i] != 1]
    rights = [j for j in reversed(range(len(target))) if target[j] != 1]
    while lefts:
        ins, outs = [lefts.pop(0)], [rights.pop(0)]
        left, right = source[ins[0]], target[outs[0]]
        while left != right:
            if left < right:
                ins.append(lefts.pop(0))
                left *= source[ins[-1]]
            else:
                outs.append(rights.pop(0))
                right *= target[outs[-1]]
        yield ins, outs


def _spec(names: list[list[str]]) -> Spec:
    return tuple((tuple(factors),) for factors in names)
