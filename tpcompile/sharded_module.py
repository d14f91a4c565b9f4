"""The class of a sharded model: the user's own, with a forward that runs the emitted graphs."""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from tpcompile.captures import Capture, capture_of
from tpcompile.covered import Overlap
from tpcompile.dispatch import Dispatcher
from tpcompile.errors import TpcompileError
from tpcompile.generation import in_step
from tpcompile.graphs import blocks_of, graph_module_of
from tpcompile.parameters import Slot, copy_sharded, sharded_for, slots

DISPATCHER = "_tpcompile_dispatcher"
AROUND = "_tpcompile_around"
"""Attribute of a model of which only parts are captured: where its other parameters are."""


class ShardedModule(nn.Module):
    """Mixed into the class of a sharded model; its forward runs the emitted graphs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the original forward, on this rank's part of the work."""
        dispatcher: Dispatcher = self.__dict__[DISPATCHER]
        find = dispatcher.find_traced if torch.compiler.is_compiling() else dispatcher.find
        variant, tensors, caches = find(args, kwargs)
        return variant.run(self, tensors, caches)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A sharded model with parameters of its own, on the same ranks."""
        sharded = sharded_for(self)
        assert sharded is not None
        dispatchers = (m.__dict__[DISPATCHER] for m in self.modules() if DISPATCHER in m.__dict__)
        shared = [kept for each in dispatchers for kept in each.immutable()] + [sharded.mesh]
        memo.update({id(kept): kept for kept in shared})
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        copy_sharded(self, new)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: process groups and this rank's part of the weights mean nothing elsewhere."""
        raise TpcompileError(
            f"pickle a sharded {type(self).__name__}",
            "it holds process groups and one rank's part of the weights",
            "save tpcompile.full_state_dict(model), or model.state_dict() with "
            "torch.distributed.checkpoint",
        )


def install(model: nn.Module, dispatcher: Dispatcher) -> None:
    """Make the model's class a `ShardedModule` with the original's name and signature."""
    # A model that has something of these names keeps it.
    graphs = {
        "graph_module": property(graph_module),
        "blocks": property(blocks),
        "captures": property(captures),
    }
    own: dict[str, Any] = {n: each for n, each in graphs.items() if not hasattr(model, n)}
    generate = getattr(type(model), "generate", None)
    if callable(generate):
        own["generate"] = in_step(generate)
    _change_class(model, ShardedModule.forward, own)
    model.__dict__[DISPATCHER] = dispatcher


def install_inner(module: nn.Module, dispatcher: Dispatcher) -> None:
    """Let a module of a sharded model run graphs of its own where it is called by itself."""
    _change_class(module, ShardedModule.forward, {})
    module.__dict__[DISPATCHER] = dispatcher


def install_around(model: nn.Module, parts: Sequence[nn.Module]) -> None:
    """Let a model of which only parts run graphs read plain tensors everywhere else."""
    inside = {module for part in parts for module in part.modules()}
    model.__dict__[AROUND] = [
        s for places in slots(model) for s in places if s.module not in inside
    ]
    original = type(model).forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _local(self.__dict__[AROUND]):
            return original(self, *args, **kwargs)

    _change_class(model, forward, {})


def _change_class(model: nn.Module, run: Callable[..., Any], names: dict[str, Any]) -> None:
    original = type(model)

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(self, *args, **kwargs)

    same = {"forward": forward, "__module__": original.__module__, "__doc__": original.__doc__}
    model.__class__ = type(original.__name__, (ShardedModule, original), names | same)


@contextmanager
def _local(places: list[Slot]) -> Iterator[None]:
    """The whole tensors of replicated DTensors in their places; gradients reach the parameters."""
    kept = [(place, place.module._parameters[place.attr]) for place in places]
    local: dict[int, torch.Tensor] = {}
    try:
        for place, parameter in kept:
            if isinstance(parameter, DTensor):
                whole = local.setdefault(id(parameter), parameter.to_local())
                place.module._parameters[place.attr] = whole  # type: ignore[assignment]
        yield
    finally:
        for place, parameter in kept:
            place.module._parameters[place.attr] = parameter


def graph_module(model: nn.Module) -> fx.GraphModule:
    """The graph of a sharded model around its blocks, for the inputs it was sharded with."""
    return graph_module_of(_dispatcher_for(model).first())


def blocks(model: nn.Module) -> dict[str, fx.GraphModule]:
    """Path of each repeated block of a sharded model -> the graph that it runs."""
    dispatcher = _dispatcher_for(model)
    return blocks_of(dispatcher.first(), dispatcher.capture.modules)


def captures(model: nn.Module) -> list[Capture]:
    """What a sharded model, and its modules that were called by themselves, are captured to."""
    return [
        capture_of(variant.program, path, training)
        for path, module in model.named_modules()
        if DISPATCHER in module.__dict__
        for variant, training in module.__dict__[DISPATCHER].all()
    ]


def overlap(model: nn.Module) -> Overlap:
    """How much of a sharded model's traffic runs beside other work, for its example inputs."""
    program = _dispatcher_for(model).first().program
    return Overlap(tuple(program.extra["covered"]), program.extra["overlap_chunks"])


def _dispatcher_for(model: nn.Module) -> Dispatcher:
    dispatcher = model.__dict__.get(DISPATCHER)
    if dispatcher is None and AROUND in model.__dict__:
        raise TpcompileError(
            f"the graphs of {type(model).__name__}",
            "it was captured block by block (partial=True)",
            "ask a block: model.get_submodule(path).graph_module",
        )
    if dispatcher is None:
        raise TpcompileError(
            f"the graphs of {type(model).__name__}",
            "the model is not sharded",
            "shard it first; tpcompile.stages shows what that would do",
        )
    return dispatcher
