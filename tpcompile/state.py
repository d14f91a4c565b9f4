"""State dicts under the original's names, shapes and bits, whatever the storage is."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpcompile.errors import CheckpointError
from tpcompile.parameters import Sharded, layouts_by_id, sharded_for
from tpcompile.storage import ParamLayout
from tpcompile.stored import gather_full


def full_state_dict(model: nn.Module, *, rank0_only: bool = False) -> dict[str, Any]:
    """The state dict the unsharded model would have: plain CPU tensors, tied ones shared.

    One tensor is gathered at a time; every rank of the mesh must call it.

    Args:
        model: A sharded model.
        rank0_only: Only global rank 0 keeps the tensors; the others return `{}`.

    Raises:
        CheckpointError: `model` is not sharded.
    """
    required(model)
    layouts = layouts_by_id(model)
    state = model.state_dict(keep_vars=True)
    keep = not rank0_only or dist.get_rank() == 0
    gathered: dict[int, Any] = {}
    for value in state.values():
        if id(value) not in gathered:
            whole = _whole(value, layouts.get(id(value)))
            gathered[id(value)] = whole if keep else None
    if not keep:
        return {}
    for key, value in state.items():
        state[key] = gathered[id(value)]
    return state


def load_state_dict(model: nn.Module, full_state: Mapping[str, Any], strict: bool = True) -> Any:
    """Copy this rank's parts of an unsharded model's state dict into `model`, in place.

    Args:
        model: A sharded model.
        full_state: As the unsharded model's `state_dict()`; every rank has all of it.
        strict: Whether the names must be exactly the model's.

    Returns:
        What `nn.Module.load_state_dict` returns: missing and unexpected keys.

    Raises:
        CheckpointError: names or shapes differ; nothing is changed.
    """
    required(model)
    layouts = layouts_by_id(model)
    state = model.state_dict(keep_vars=True)
    missing = [key for key in state if key not in full_state]
    unexpected = [key for key in full_state if key not in state]
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"cannot load the state dict into {type(model).__name__}.",
            f"missing: {some(missing)}; unexpected: {some(unexpected)}.",
            "load a state dict of the same model, or pass strict=False.",
        )
    for key, value in state.items():
        if isinstance(value, Tensor) and key in full_state:
            layout = layouts.get(id(value))
            check_shape(key, full_state[key], layout.shape if layout else tuple(value.shape))
    return model.load_state_dict(full_state, strict=strict)


def check_shape(key: str, found: Any, shape: tuple[int, ...]) -> None:
    """Raise CheckpointError where `found` is not a tensor of this shape."""
    what = list(found.shape) if hasattr(found, "shape") else type(found).__name__
    if what != list(shape):
        raise CheckpointError(
            f"cannot load {key} {list(shape)}.",
            f"the state dict has {what} under this name.",
            "load the state dict of the unsharded model (full_state_dict gives it).",
        )


def _whole(value: Any, layout: ParamLayout | None) -> Any:
    if isinstance(value, DTensor):
        return gather_full(value, layout or ParamLayout.replicated(value.shape, 1))
    if isinstance(value, Tensor):
        return value.detach().clone() if value.is_meta else value.detach().cpu().clone()
    return value


def required(model: nn.Module) -> Sharded:
    """What is known of a sharded model; CheckpointError for any other."""
    sharded = sharded_for(model)
    if sharded is None:
        raise CheckpointError(
            f"cannot treat {type(model).__name__} as a sharded model.",
            "tpcompile has not sharded this object.",
            "pass the module that tpcompile.shard returned, not a part or a wrapper of it.",
        )
    return sharded


def some(keys: list[str], limit: int = 5) -> str:
    """The first few of some names, and how many more there are."""
    more = f" and {len(keys) - limit} more" if len(keys) > limit else ""
    return (", ".join(keys[:limit]) or "none") + more
