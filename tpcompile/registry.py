"""A module's `_parameters` of which Dynamo sees whole parameters without memory, others the shards.

Dynamo's guards and traces are about the model as its author wrote it, so that a graph has global
shapes; everybody else, from optimizers to state dicts, has to meet what really exists.
"""

import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpcompile.errors import MeshError, TpcompileError
from tpcompile.parameters import layouts_of
from tpcompile.stored import read_whole
from tpcompile.torch_private import (
    call_module,
    is_dynamo_compiling,
    replace_call,
    skip_frames,
)

_FORWARD: ContextVar[bool] = ContextVar("forward", default=False)
"""Whether a forward of the model runs."""


class Registry(dict[str, nn.Parameter | None]):
    """Name -> parameter; its C level content, which guards read, is what Dynamo may see."""

    def __init__(self, module: nn.Module) -> None:
        """Of a module of whose parameters none is sharded yet."""
        super().__init__(module._parameters)
        self.layouts = partial(layouts_of, module)
        self.shards: dict[str, nn.Parameter] = {}
        self.read: set[str] = set()
        """What Python code has read whole, beside the graphs."""

    def replace_traced(self, key: str, value: nn.Parameter) -> None:
        """Let Dynamo see another parameter."""
        dict.__setitem__(self, key, value)

    def whole(self, key: str) -> Any:
        """The whole tensor, to compute with outside of graphs; all ranks take part."""
        shard = self.shards.get(key)
        if shard is None:
            return dict.__getitem__(self, key)
        self.read.add(key)
        return _read_whole(shard, self.layouts()[key])

    def traced(self, key: str) -> nn.Parameter | None:
        """The parameter as Dynamo sees it."""
        return dict.__getitem__(self, key)

    def __getitem__(self, key: str) -> nn.Parameter | None:
        """A shard, or where there is none or Dynamo asks, the whole parameter."""
        # Dynamo follows these two lines when it traces a module that reads a parameter.
        if torch.compiler.is_compiling():
            return dict.__getitem__(self, key)
        caller = sys._getframe(1).f_code
        return _shown(self, key, caller is nn.Module.__getattr__.__code__ and _FORWARD.get())

    def __setitem__(self, key: str, value: nn.Parameter | None) -> None:
        self.shards.pop(key, None)
        if isinstance(value, DTensor):
            self.shards[key] = value  # type: ignore[assignment]
        else:
            dict.__setitem__(self, key, value)

    def __delitem__(self, key: str) -> None:
        self.shards.pop(key, None)
        dict.__delitem__(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(list(dict.keys(self)))

    def get(self, key: str, default: Any = None) -> Any:
        """As of any dict."""
        return self[key] if key in self else default  # noqa: SIM401

    def items(self) -> Any:
        """As of any dict, but a list."""
        return [(key, self[key]) for key in self]

    def values(self) -> Any:
        """As of any dict, but a list."""
        return [self[key] for key in self]

    def pop(self, key: str, *default: Any) -> Any:
        """As of any dict."""
        if key not in self and default:
            return default[0]
        value = self[key]
        del self[key]
        return value

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As of any dict."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def clear(self) -> None:
        """As of any dict."""
        self.shards.clear()
        dict.clear(self)

    def copy(self) -> dict[str, nn.Parameter | None]:
        """A plain dict of what this one shows."""
        return dict(self.items())

    def __or__(self, other: Any) -> Any:
        return self.copy() | dict(other)

    def __eq__(self, other: object) -> bool:
        return self.copy() == other

    def __repr__(self) -> str:
        return repr(self.copy())

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _refuse("copy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("pickle")


_read_whole: Any = torch.compiler.disable(read_whole)  # it runs between compiled frames


def _shown(registry: Registry, key: str, computes: bool) -> Any:
    """A parameter; for what `computes` with it outside of graphs, the whole tensor."""
    value = dict.__getitem__(registry, key)
    shard = registry.shards.get(key)
    if shard is None or is_dynamo_compiling():
        return value
    return registry.whole(key) if computes else shard


def _refuse(what: str) -> NoReturn:
    raise TpcompileError(
        f"{what} a model that the tpcompile backend has sharded",
        "it holds process groups and one rank's part of the weights, and its graphs are its own",
        "save tpcompile.full_state_dict(model), or model.state_dict() with "
        "torch.distributed.checkpoint; load it into a new model, and compile that",
    )


def install_registries(model: nn.Module, device: str, before: Callable[[], None]) -> None:
    """Give every module of the model that has parameters a `Registry`.

    Args:
        model: Changed in place.
        device: Type of the mesh's devices.
        before: Is called before each call of the model itself.
    """
    skip_frames(Registry.__getitem__, _shown, is_dynamo_compiling, call_module, _call, _apply)
    skip_frames(Registry.whole)
    for module in model.modules():
        if not isinstance(module._parameters, Registry):
            if module._parameters:
                module.__dict__["_parameters"] = Registry(module)
                module.__dict__["_apply"] = partial(_apply, module, device)
            if not (module._forward_hooks or module._forward_pre_hooks):
                # Dynamo guards on what modules with hooks are made of.
                replace_call(module, partial(_call, module, before if module is model else None))


def _call(module: nn.Module, before: Callable[[], None] | None, *args: Any, **kwargs: Any) -> Any:
    """Call a module; what its Python code reads meanwhile is whole, if no graph replaces it."""
    if torch.compiler.is_compiling():
        return call_module(module, *args, **kwargs)
    if not _FORWARD.get() and before is not None:
        before()
    token = _FORWARD.set(True)
    try:
        if "_flat_weights_names" in module.__dict__:  # recurrent modules keep a list of their own
            names = module.__dict__["_flat_weights_names"]
            module.__dict__["_flat_weights"] = [getattr(module, name) for name in names]
        return call_module(module, *args, **kwargs)
    finally:
        _FORWARD.reset(token)


def _apply(
    module: nn.Module, device: str, function: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """`nn.Module._apply`, which `to`, `half` and others call; Dynamo sees a new dtype too."""
    for parameter in module._parameters.values():
        if parameter is None:
            continue
        probe = function(torch.empty(1, dtype=parameter.dtype, device=parameter.device))
        if probe.device.type != device or (device == "cpu" and probe.is_shared()):
            what = f"to {probe.device}" if probe.device.type != device else "into shared memory"
            raise MeshError(
                f"move {type(module).__name__} {what}",
                f"the tpcompile backend has sharded it over {device} devices",
                "move the model before its first compiled call",
            )
    type(module)._apply(module, function, recurse)
    registry = module._parameters
    assert isinstance(registry, Registry)
    for key, shard in registry.shards.items():
        whole = registry.traced(key)
        assert whole is not None
        if whole.dtype != shard.dtype:
            whole.data = weightless(whole, shard.dtype)
    return module


def read_outside(model: nn.Module) -> list[str]:
    """Names of sharded parameters that Python code has read whole, beside the graphs."""
    found = []
    for path, module in model.named_modules():
        if isinstance(module._parameters, Registry):
            found += [f"{path}.{key}" if path else key for key in sorted(module._parameters.read)]
    return found


def traced_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter as Dynamo sees it) of the whole model; tied ones under every name."""
    for path, module in model.named_modules(remove_duplicate=False):
        held = module._parameters
        for attr in held:
            value = held.traced(attr) if isinstance(held, Registry) else held[attr]
            if value is not None:
                yield (f"{path}.{attr}" if path else attr), value


def weightless(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of the same shape, strides and device that holds no memory."""
    bare = torch.empty_strided(
        parameter.shape,
        parameter.stride(),
        dtype=dtype or parameter.dtype,
        device=parameter.device,
    )
    bare.untyped_storage().resize_(0)
    return bare
