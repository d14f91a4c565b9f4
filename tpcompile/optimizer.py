"""Optimizers of sharded models: made before sharding, and what their state dicts hold."""

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tpcompile.errors import ShardingError
from tpcompile.parameters import Sharded, all_sharded, layouts_by_id, moved
from tpcompile.storage import ParamLayout
from tpcompile.stored import distribute, view_original
from tpcompile.stored_tensor import Stored


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
        optimizer.state[new] = {
            key: place(value) if _follows(key, value, tuple(old.shape)) else value
            for key, value in state.items()
        }


_HOOKED: WeakSet[Optimizer] = WeakSet()
_WATCHING: list[Any] = []


def watch_optimizers() -> None:
    """Hook every optimizer at its first step: most are made after the model is sharded."""
    if not _WATCHING:
        _WATCHING.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    follow_moved(optimizer)
    hook_optimizer(optimizer)


def follow_moved(optimizer: Optimizer) -> None:
    """Put parameters in the place of those that they replaced after the optimizer was made."""
    while True:
        every = [p for group in optimizer.param_groups for p in group["params"]]
        stale = [(p, *to) for p in every if (to := moved(p)) is not None]
        if not stale:
            return
        check_optimizer(optimizer)
        for old, new, place in stale:
            remap_parameter(optimizer, old, new, place)


def hook_optimizer(optimizer: Optimizer) -> None:
    """Let its state dicts have, and load, the original shapes of sharded parameters.

    State of a parameter that is stored in another order becomes `Stored`, as in a module's state
    dict; whole tensors are loaded as originals.  Nothing happens the second time.
    """
    if optimizer not in _HOOKED:
        _HOOKED.add(optimizer)
        optimizer.register_state_dict_post_hook(_view_state)
        optimizer.register_load_state_dict_pre_hook(_load_state)


def _view_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    def view(key: str, value: Any, layout: ParamLayout, sharded: Sharded) -> Any:
        stored = isinstance(value, DTensor) and _follows(key, value, layout.storage_shape())
        if not stored or layout.is_identity():
            return value
        return view_original(value, layout, sharded.mesh)

    return _mapped(optimizer, state_dict, view)


def _load_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    def load(key: str, value: Any, layout: ParamLayout, sharded: Sharded) -> Any:
        if not _follows(key, value, layout.shape):
            return value
        if isinstance(value, Stored) and value.param_layout == layout:
            return value.stored()
        if isinstance(value, DTensor):
            if layout.is_identity():
                return value
            value = value.full_tensor()
        return distribute(value, layout, sharded.mesh)

    return _mapped(optimizer, state_dict, load)


def _mapped(
    optimizer: Optimizer, state_dict: dict[str, Any], convert: Callable[..., Any]
) -> dict[str, Any]:
    """A copy of the state dict with the state of sharded parameters converted."""
    known = {
        number: (layout, sharded)
        for model, sharded in all_sharded()
        for number, layout in layouts_by_id(model).items()
    }
    state = dict(state_dict["state"])
    for index, parameter in _numbered(optimizer, state_dict):
        if index in state and id(parameter) in known:
            state[index] = {
                key: convert(key, value, *known[id(parameter)])
                for key, value in state[index].items()
            }
    return {**state_dict, "state": state}


def _numbered(optimizer: Optimizer, state_dict: dict[str, Any]) -> Iterator[tuple[Any, Tensor]]:
    """(key in the state dict, parameter): both list the groups' parameters in the same order."""
    for theirs, ours in zip(state_dict["param_groups"], optimizer.param_groups, strict=False):
        yield from zip(theirs["params"], ours["params"], strict=False)


def _follows(key: str, value: Any, shape: tuple[int, ...]) -> bool:
    """Whether state is one value per element of a parameter of this shape."""
    # A scalar parameter's step counter has the parameter's shape too.
    return isinstance(value, Tensor) and tuple(value.shape) == shape and key != "step"
