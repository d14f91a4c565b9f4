"""What a traced forward gives back, and what it leaves in the caches that it was given."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .structure import Structure, renew, take_apart


@dataclass(frozen=True)
class OutputSpec:
    """How to rebuild the user's output, and bring given caches up to date, from flat tensors."""

    structure: Structure
    """Of the output."""
    entries: tuple[str, ...] = ()
    """Path in its cache of every flat tensor; "" for others."""
    given: dict[int, int] = field(default_factory=dict)
    """Leaf of the output -> number of the given cache that it is."""
    after: tuple[Structure, ...] = ()
    """Of the given caches, as the forward leaves them."""
    kept: dict[int, int] = field(default_factory=dict)
    """Leaf of all `after` -> number of the input tensor that is still there."""

    def rebuild(
        self, tensors: Sequence[Any], caches: Sequence[Any] = (), inputs: Sequence[Any] = ()
    ) -> Any:
        """The output; the call's caches are changed, and stand where the forward returned them.

        Without `caches` new ones are made.
        """
        rest = iter(tensors)
        count = sum(1 for _ in tensors) - self._in_caches()
        own = [next(rest) for _ in range(count)]
        left, number = [], 0
        for i, structure in enumerate(self.after):
            size = _count(structure)
            leaves = [
                inputs[self.kept[k]] if k in self.kept else next(rest)
                for k in range(number, number + size)
            ]
            number += size
            old = caches[i] if caches else None
            left.append(renew(old, structure, iter(leaves)))
        plain = iter(own)
        leaves = [
            left[self.given[k]] if k in self.given else next(plain)
            for k in range(count + len(self.given))
        ]
        return self.structure.unflatten(iter(leaves))

    def _in_caches(self) -> int:
        return sum(map(_count, self.after)) - len(self.kept)


def take_output(
    output: Any, caches: Sequence[Any], inputs: Sequence[Tensor]
) -> tuple[list[Any], OutputSpec]:
    """(flat values, their spec) of a traced call; `caches` are those that it was given."""
    whole = take_apart(output, is_traced, given=caches)
    places = {id(cache): i for i, cache in enumerate(caches)}
    leaves, entries, given = [], [], {}
    for i, leaf in enumerate(whole.leaves):
        if id(leaf) in places:
            given[i] = places[id(leaf)]
        else:
            leaves.append(leaf)
            entries.append(whole.entries[i])
    numbers = {id(tensor): i for i, tensor in enumerate(inputs)}
    after, kept, count = [], {}, 0
    for cache in caches:
        flat = take_apart(cache, is_traced)
        after.append(flat.structure)
        for leaf, entry in zip(flat.leaves, flat.entries, strict=True):
            if id(leaf) in numbers:
                kept[count] = numbers[id(leaf)]
            else:
                leaves.append(leaf)
                entries.append(entry)
            count += 1
    return leaves, OutputSpec(whole.structure, tuple(entries), given, tuple(after), kept)


def is_traced(value: Any) -> bool:
    """Whether a value depends on what is traced."""
    return isinstance(value, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))


def _count(structure: Structure) -> int:
    if structure.build is None:
        return 1
    return sum(map(_count, structure.children))
