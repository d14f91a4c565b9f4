"""A module's `_parameters` of which Dynamo sees whole parameters without memory, others the shards.

Dynamo's guards and traces are about the model as its author wrote it, so that a graph has global
shapes; everybody else, from optimizers to state dicts, has to meet what really exists.
"""

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpcompile.errors import TpcompileError
from tpcompile.torch_private import is_dynamo_compiling, skip_frames


class Registry(dict[str, nn.Parameter | None]):
    """Name -> parameter; its C level content, which guards read, is what Dynamo may see."""

    def __init__(self, parameters: dict[str, nn.Parameter | None]) -> None:
        """Of a module's parameters, none of which is sharded yet."""
        super().__init__(parameters)
        self.shards: dict[str, nn.Parameter] = {}

    def traced(self, key: str) -> nn.Parameter | None:
        """The parameter as Dynamo sees it."""
        return dict.__getitem__(self, key)

    def __getitem__(self, key: str) -> nn.Parameter | None:
        """A shard, or where there is none or Dynamo asks, the whole parameter."""
        # Dynamo follows these two lines when it traces a module that reads a parameter.
        if torch.compiler.is_compiling():
            return dict.__getitem__(self, key)
        return _shown(self, key)

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


def _shown(registry: Registry, key: str) -> nn.Parameter | None:
    value = dict.__getitem__(registry, key)
    return value if is_dynamo_compiling() else registry.shards.get(key, value)


def _refuse(what: str) -> NoReturn:
    raise TpcompileError(
        f"{what} a model that the tpcompile backend has sharded",
        "it holds process groups and one rank's part of the weights, and its graphs are its own",
        "save tpcompile.full_state_dict(model), or model.state_dict() with "
        "torch.distributed.checkpoint; load it into a new model, and compile that",
    )


def install_registries(model: nn.Module) -> None:
    """Give every module of the model that has parameters a `Registry`."""
    skip_frames(Registry.__getitem__, _shown, is_dynamo_compiling)
    for module in model.modules():
        if module._parameters and not isinstance(module._parameters, Registry):
            module.__dict__["_parameters"] = Registry(module._parameters)


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
