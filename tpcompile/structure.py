"""Nested arguments and outputs as flat tensors plus a hashable description of the rest."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .caches import carrier_of, is_cache, is_cache_part, is_length, length_of

DEPTH = 6
"""How many plain Python objects deep tensors are looked for (a cache holds layers hold tensors)."""


@dataclass(frozen=True)
class Structure:
    """How to rebuild one value: `build(context, children)`; a tensor where `build` is None."""

    build: Callable[[Any, list[Any]], Any] | None
    context: Constant | None = None
    children: tuple[Structure, ...] = ()

    def unflatten(self, tensors: Iterator[Any]) -> Any:
        """The value, its tensors taken from `tensors` in order."""
        if self.build is None:
            return next(tensors)
        children = [child.unflatten(tensors) for child in self.children]
        return self.build(self.context.value if self.context else None, children)


class Constant:
    """A value compared by equality and type (`1`, `1.0` and `True` differ), hashable always."""

    def __init__(self, value: Any) -> None:
        self.value = value
        try:
            hash(value)
            self._key: Any = (type(value), value)
        except TypeError:
            self._key = (type(value), repr(value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Constant({self.value!r})"


@dataclass
class Flat:
    """A value taken apart."""

    leaves: list[Any] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    """Dotted, such as `batch.text.ids`; the root's is ""."""
    entries: list[str] = field(default_factory=list)
    """Path of a leaf inside of the cache it belongs to; "" for other leaves."""
    caches: list[Any] = field(default_factory=list)
    """The outermost caches, in order."""
    structure: Structure = field(default_factory=lambda: Structure(None))
    """`structure.unflatten(iter(leaves))` is the value again."""


def flatten(value: Any, is_leaf: Callable[[Any], bool]) -> tuple[list[Any], Structure, list[str]]:
    """(leaves, structure, paths) of a value: see `Flat`."""
    flat = take_apart(value, is_leaf)
    return flat.leaves, flat.structure, flat.paths


def take_apart(value: Any, is_leaf: Callable[[Any], bool], given: Sequence[Any] = ()) -> Flat:
    """A value's leaves and the structure that they leave; `given` caches are leaves as well."""
    flat = Flat()
    known = set(map(id, given))

    def leaf(item: Any, path: str, entry: str) -> Structure:
        flat.leaves.append(item)
        flat.paths.append(path)
        flat.entries.append(entry)
        return Structure(None)

    def visit(item: Any, path: str, name: Any, entry: str | None) -> Structure:
        if is_leaf(item) and not (entry is not None and is_length(name, item)):
            return leaf(item, path, entry or "")
        if id(item) in known:
            return leaf(item, path, "")
        if entry is not None and is_length(name, item):
            return Structure(_build_length, None, (leaf(carrier_of(item), path, entry),))
        if entry is None and is_cache(item):
            flat.caches.append(item)
            entry = ""
        parts = _parts(item, is_leaf, entry is not None)
        if parts is None:
            return Structure(_constant, Constant(item))
        build, context, names, children = parts
        below = [
            visit(child, _join(path, key), key, entry if entry is None else _join(entry, key))
            for key, child in zip(names, children, strict=True)
        ]
        return Structure(build, Constant(context), tuple(below))

    flat.structure = visit(value, "", "", None)
    return flat


def _join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def renew(old: Any, structure: Structure, leaves: Iterator[Any]) -> Any:
    """`structure.unflatten(leaves)`, in the objects, lists and dicts of `old` where they match."""
    if structure.build is _build_object and type(old) is structure.context.value[0]:  # type: ignore
        names = structure.context.value[1]  # type: ignore[union-attr]
        for name, child in zip(names, structure.children, strict=True):
            object.__setattr__(old, name, renew(vars(old).get(name), child, leaves))
        return old
    if structure.build is _build_sequence and type(old) is list:
        before = [*old, *[None] * len(structure.children)]
        old[:] = [renew(b, c, leaves) for b, c in zip(before, structure.children, strict=False)]
        return old
    return structure.unflatten(leaves)


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor."""
    return isinstance(value, Tensor)


Parts = tuple[Callable[[Any, list[Any]], Any], Any, list[Any], list[Any]]


def _parts(item: Any, is_leaf: Callable[[Any], bool], in_cache: bool) -> Parts | None:
    """(build, context, names, children) of a container; None for anything else."""
    kind = type(item)
    if in_cache and is_cache_part(item):
        names = list(vars(item))
        return _build_object, (kind, tuple(names)), names, list(vars(item).values())
    if isinstance(item, Mapping):
        names = list(item)
        if kind is dict:
            return _build_dict, tuple(names), names, list(item.values())
        if is_dataclass(item):
            return _build_model_output, (kind, tuple(names)), names, list(item.values())
        return _build_mapping, (_Shell(item), tuple(names)), names, list(item.values())
    if isinstance(item, (list, tuple)):
        if hasattr(kind, "_fields"):
            return _build_namedtuple, kind, list(kind._fields), list(item)
        return _build_sequence, kind, list(range(len(item))), list(item)
    if is_dataclass(item) and not isinstance(item, type):
        names = [f.name for f in fields(item) if hasattr(item, f.name)]
        return _build_object, (kind, tuple(names)), names, [getattr(item, n) for n in names]
    if _holds_leaf(item, is_leaf, DEPTH):
        names = list(vars(item))
        return _build_object, (kind, tuple(names)), names, list(vars(item).values())
    return None


def _holds_leaf(item: Any, is_leaf: Callable[[Any], bool], depth: int) -> bool:
    if is_leaf(item):
        return True
    if depth == 0 or isinstance(item, (nn.Module, type, str, int, float, torch.dtype)):
        return False
    if isinstance(item, Mapping):
        below: Any = item.values()
    elif isinstance(item, (list, tuple)):
        below = item
    else:
        below = getattr(item, "__dict__", {}).values()
    return any(_holds_leaf(child, is_leaf, depth - 1) for child in below)


class _Shell:
    """An emptied copy of a mapping, equal to others of its type."""

    def __init__(self, item: Any) -> None:
        self.kind = type(item)
        self.empty = copy.copy(item)
        self.empty.clear()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shell) and self.kind is other.kind

    def __hash__(self) -> int:
        return hash(self.kind)


def _constant(context: Any, children: list[Any]) -> Any:
    return context


def _build_dict(names: Any, children: list[Any]) -> Any:
    return dict(zip(names, children, strict=True))


def _build_model_output(context: Any, children: list[Any]) -> Any:
    kind, names = context
    return kind(**dict(zip(names, children, strict=True)))


def _build_mapping(context: Any, children: list[Any]) -> Any:
    shell, names = context
    new = copy.copy(shell.empty)
    for name, child in zip(names, children, strict=True):
        new[name] = child
    return new


def _build_length(context: Any, children: list[Any]) -> Any:
    return length_of(children[0])


def _build_sequence(kind: Any, children: list[Any]) -> Any:
    return kind(children)


def _build_namedtuple(kind: Any, children: list[Any]) -> Any:
    return kind(*children)


def _build_object(context: Any, children: list[Any]) -> Any:
    kind, names = context
    new = object.__new__(kind)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(new, name, child)
    return new
