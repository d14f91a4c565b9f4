"""Carry an optimizer made before sharding over to the sharded parameters."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tpcompile.errors import ShardingError


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise ShardingError where the optimizer holds state that cannot be split."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
                raise ShardingError(
                    f"cannot shard the state of {type(optimizer).__name__}.",
                    f"its {key} has shape {list(value.shape)} for a parameter of shape "
                    f"{list(parameter.shape)}.",
                    "shard the model before the optimizer's first step.",
                )


def remap_parameter(
    optimizer: Optimizer, old: nn.Parameter, new: nn.Parameter, place: Callable[[Tensor], Tensor]
) -> None:
    """Put `new` in the place of `old`: same group, same position, its state sharded like it.

    The optimizer stays the same object, so schedulers and scalers keep working.  Pass
    `partial(remap_parameter, optimizer)` to `parameters.shard_parameters`.

    Args:
        optimizer: Changed in place; nothing happens where it does not have `old`.
        old: A full parameter.
        new: What replaces it.
        place: Makes a DTensor of a full tensor of the parameter's shape.
    """
    for group in optimizer.param_groups:
        group["params"][:] = [new if p is old else p for p in group["params"]]
    if old in optimizer.state:
        state = optimizer.state.pop(old)
        optimizer.state[new] = {k: _placed(k, v, old, place) for k, v in state.items()}


def _placed(key: str, value: Any, old: nn.Parameter, place: Callable[[Tensor], Tensor]) -> Any:
    # A scalar parameter's step counter has the parameter's shape too.
    if isinstance(value, Tensor) and value.shape == old.shape and key != "step":
        return place(value)
    return value
