"""Which variant of a sharded model runs a call: by the call's structure, then by its sizes."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from tpcompile.caches import caches_in
from tpcompile.calls import describe, examples, rebuild
from tpcompile.capture_inputs import bind, call_key
from tpcompile.errors import InputError
from tpcompile.parameters import slots
from tpcompile.recapture import Recapture
from tpcompile.runtime import GRAPHS, Variant
from tpcompile.structure import Flat


@dataclass
class Route:
    """Where calls of one description go."""

    order: tuple[int, ...]
    """Which tensor of the call is the first input of the variants, the second, ..."""
    caches: tuple[int, ...]
    """Which of the call's caches is the variants' first, second, ..."""
    variants: list[Variant]
    """Of all sizes so far; shared by routes that differ in how arguments are passed."""


Found = tuple[Variant, list[Tensor], list[Any]]
"""The variant that runs a call, its input tensors and its caches."""


class Dispatcher:
    """The variants of one sharded model, and the way to make more."""

    def __init__(self, model: nn.Module, device: str, capture: Recapture) -> None:
        """`device` is the type of the mesh's devices."""
        self.model, self.device, self.capture = model, device, capture
        self.modules = list(model.modules())
        self.parameters = [(s.module._parameters, s.attr) for (s, *_) in slots(model)]
        self.variants: dict[tuple[Hashable, int], list[Variant]] = {}
        self.routes: list[Route] = []
        self.numbers: dict[Hashable, int] = {}
        """Description of a call and state of the model -> its place in `routes`."""
        self._flags: list[Any] = []
        self._state = 0
        self._states: dict[tuple[Any, ...], int] = {}

    def add(self, args: Any, kwargs: Any, variant: Variant) -> None:
        """Keep a variant made for these inputs."""
        self._variants_for(bind(self.model, args, kwargs)).append(variant)

    def first(self) -> Variant:
        """The variant that the model was sharded with."""
        return next(chain.from_iterable(self.variants.values()))

    def all(self) -> Iterator[tuple[Variant, bool]]:
        """Every variant, and whether the model trains when it runs."""
        training = {number: flags[0] for flags, number in self._states.items()}
        for (_, state), variants in self.variants.items():
            yield from ((variant, training[state]) for variant in variants)

    def find(self, args: Any, kwargs: Any) -> Found:
        """The variant that fits these inputs, made now if there is none."""
        tensors: list[Tensor] = []
        caches: list[Any] = []
        description = describe((*args, *kwargs.values()), tensors, caches)
        if description is None:
            bound = bind(self.model, args, kwargs)
            tensors, caches, variants = bound.leaves, bound.caches, self._variants_for(bound)
        else:
            route = self.routes[self.number(self._key(args, kwargs, description))]
            tensors, caches = [tensors[i] for i in route.order], [caches[i] for i in route.caches]
            variants = route.variants
        for variant in variants:
            if variant.fits(*tensors):
                return variant, tensors, caches
        if self.capture.cut(caches):
            return self.find(args, kwargs)
        variants.append(self.capture(args, kwargs))
        # The first capture says how the tensors of caches are dealt out.
        return self.find(args, kwargs) if caches else (variants[-1], tensors, caches)

    def find_traced(self, args: Any, kwargs: Any) -> Found:
        """`find` as torch.compile can trace it: what depends on no tensor runs beside the trace."""
        tensors: list[Tensor] = []
        description = describe((*args, *kwargs.values()), tensors)
        if description is None:
            _refuse(type(self.model).__name__)
            raise AssertionError
        for module in self.modules:
            module.training  # noqa: B018  (a guard)
        key = self._key(args, kwargs, description)
        route = self.routes[_number(self, key)]
        ordered = [tensors[i] for i in route.order]
        for variant in route.variants:
            if variant.fits(*ordered):
                return variant, ordered, []
        _refuse_new(type(self.model).__name__)
        raise AssertionError

    def number(self, key: tuple[Any, ...]) -> int:
        """The place in `routes` of calls of this key, in the model's present state."""
        full = (key, self.state())
        number = self.numbers.get(full)
        if number is None:
            marks = examples(key[2], self.device)
            args, kwargs = _arguments(key, marks)
            bound, given = bind(self.model, args, kwargs), list(caches_in((args, kwargs)))
            order = tuple(_place(tensor, marks) for tensor in bound.leaves)
            caches = tuple(_place(cache, given) for cache in bound.caches)
            self.routes.append(Route(order, caches, self._variants_for(bound)))
            number = self.numbers[full] = len(self.routes) - 1
        return number

    def state(self) -> int:
        """A number for which modules train, and which types and gradients parameters have."""
        flags: list[Any] = [module.training for module in self.modules]
        for parameters, attr in self.parameters:
            parameter = parameters[attr]
            assert parameter is not None
            flags += (parameter.requires_grad, parameter.dtype)
        if flags != self._flags:
            self._flags = flags
            self._state = self._states.setdefault(tuple(flags), len(self._states))
        return self._state

    def immutable(self) -> Iterator[Any]:
        """What copies of the model share."""
        for variant in chain.from_iterable(self.variants.values()):
            yield from (variant.program, variant.root)
        for module in self.modules:
            yield from (graph.module for graph in module.__dict__.get(GRAPHS, ()))
        yield from self.capture.immutable()

    def _key(self, args: Any, kwargs: Any, description: tuple[Any, ...]) -> tuple[Any, ...]:
        on = torch.is_autocast_enabled(self.device)
        autocast = torch.get_autocast_dtype(self.device) if on else None
        return len(args), tuple(kwargs), description, autocast

    def _variants_for(self, bound: Flat) -> list[Variant]:
        return self.variants.setdefault((call_key(bound), self.state()), [])


def _place(item: Any, items: list[Any]) -> int:
    return next(i for i, other in enumerate(items) if other is item)


def _arguments(key: tuple[Any, ...], tensors: list[Tensor]) -> tuple[tuple[Any, ...], Any]:
    """(args, kwargs) of calls of this key."""
    count, names, description, _ = key
    values = rebuild(description, iter(tensors))
    return tuple(values[:count]), dict(zip(names, values[count:], strict=True))


# What torch.compile runs while it traces, instead of tracing it:


@torch.compiler.assume_constant_result
def _refuse(model: str) -> None:
    raise InputError(
        f"torch.compile of a sharded {model} called with an argument of a class of its own",
        "a trace can tell tensors, numbers, strings, lists, tuples and dicts apart",
        "pass the tensors themselves, or compile the blocks instead: block.compile()",
    )


@torch.compiler.assume_constant_result
def _number(dispatcher: Dispatcher, key: tuple[Any, ...]) -> int:
    return dispatcher.number(key)


@torch.compiler.assume_constant_result
def _refuse_new(model: str) -> None:
    raise InputError(
        f"torch.compile of a sharded {model} called with inputs of a new kind",
        "no capture fits their sizes, and a trace cannot make one",
        "call the model itself once with such inputs, then the compiled one",
    )
