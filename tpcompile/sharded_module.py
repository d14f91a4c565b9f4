"""The class of a sharded model: the user's own, with a forward that runs the emitted graphs."""

import copy
import functools
from typing import Any

import torch
from torch import fx, nn

from tpcompile.dispatch import Dispatcher
from tpcompile.errors import TpcompileError
from tpcompile.graphs import blocks_of, graph_module_of
from tpcompile.parameters import copy_sharded, sharded_for

DISPATCHER = "_tpcompile_dispatcher"


class ShardedModule(nn.Module):
    """Mixed into the class of a sharded model; its forward runs the emitted graphs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the original forward, on this rank's part of the work."""
        dispatcher: Dispatcher = self.__dict__[DISPATCHER]
        find = dispatcher.find_traced if torch.compiler.is_compiling() else dispatcher.find
        variant, tensors = find(args, kwargs)
        return variant.run(self, tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A sharded model with parameters of its own, on the same ranks."""
        dispatcher: Dispatcher = self.__dict__[DISPATCHER]
        sharded = sharded_for(self)
        assert sharded is not None
        shared = (*dispatcher.immutable(), sharded.mesh)
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
    original = type(model)

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return ShardedModule.forward(self, *args, **kwargs)  # type: ignore[arg-type]

    # A model that has something of these names keeps it.
    graphs = {"graph_module": property(graph_module), "blocks": property(blocks)}
    own = {name: each for name, each in graphs.items() if not hasattr(model, name)}
    names = {"forward": forward, "__module__": original.__module__, "__doc__": original.__doc__}
    model.__class__ = type(original.__name__, (ShardedModule, original), {**own, **names})
    model.__dict__[DISPATCHER] = dispatcher


def graph_module(model: nn.Module) -> fx.GraphModule:
    """The graph of a sharded model around its blocks, for the inputs it was sharded with."""
    return graph_module_of(_dispatcher_for(model).first())


def blocks(model: nn.Module) -> dict[str, fx.GraphModule]:
    """Path of each repeated block of a sharded model -> the graph that it runs."""
    dispatcher = _dispatcher_for(model)
    return blocks_of(dispatcher.first(), dispatcher.capture.modules)


def _dispatcher_for(model: nn.Module) -> Dispatcher:
    dispatcher = model.__dict__.get(DISPATCHER)
    if dispatcher is None:
        raise TpcompileError(
            f"the graphs of {type(model).__name__}",
            "the model is not sharded",
            "shard it first; tpcompile.stages shows what that would do",
        )
    return dispatcher
