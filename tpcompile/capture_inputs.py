"""A model's inputs as flat tensors, a key for the rest, and the dims that may vary."""

import inspect
from collections.abc import Hashable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .errors import InputError
from .structure import Structure, flatten, is_tensor


def flatten_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor], Hashable]:
    """(tensors, key) of one call.

    The key is equal for calls that differ in nothing but sizes and values of tensors: it holds
    the structure, every argument that is not a tensor, each tensor's dtype, rank and whether it
    needs a gradient, and the autocast state.  Arguments given by position and by keyword give
    the same key.

    Raises:
        InputError: The arguments do not fit the forward's signature.
    """
    tensors, structure, _ = bind_inputs(model, args, kwargs)
    kinds = tuple((t.dtype, t.ndim, t.requires_grad) for t in tensors)
    return tensors, (structure, kinds, autocast_state(tensors))


def bind_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor], Structure, list[str]]:
    """(tensors, structure, names); the structure rebuilds `(args, kwargs)` in one fixed order.

    Arguments that are their parameter's default are left out.
    """
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise _signature_error(model, signature, args, kwargs, error) from None
    positional: list[Any] = []
    names: list[str] = []
    keywords: dict[str, Any] = {}
    has_star = any(
        signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        for name in bound.arguments
    )
    for name, value in bound.arguments.items():
        parameter = signature.parameters[name]
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            positional += value
            names += [f"{name}.{i}" for i in range(len(value))]
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            keywords.update(sorted(value.items()))
        elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY or (
            has_star and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ):
            positional.append(value)
            names.append(name)
        elif value is not parameter.default:
            keywords[name] = value
    leaves, structure, paths = flatten((tuple(positional), keywords), is_tensor)
    return leaves, structure, [_input_name(path, names) for path in paths]


def _input_name(path: str, positional: list[str]) -> str:
    """`1.batch.ids` is keyword `batch.ids`; `0.2.ids` is the third positional's `ids`."""
    where, _, rest = path.partition(".")
    if where == "1":
        return rest
    index, _, below = rest.partition(".")
    return f"{positional[int(index)]}.{below}" if below else positional[int(index)]


def autocast_state(tensors: list[Tensor]) -> tuple[tuple[str, torch.dtype], ...]:
    """(device type, dtype) of every kind of device of `tensors` for which autocast is on."""
    kinds = sorted({t.device.type for t in tensors} - {"meta"})
    return tuple(
        (kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)
    )


def dynamic_dims(tensors: list[Tensor]) -> list[list[int]]:
    """Dims of each tensor that may vary from call to call: the first two where larger than 1.

    Batch and sequence come first in nearly every model; sizes 0 and 1 change what ops mean.
    """
    return [[dim for dim in range(min(2, t.ndim)) if t.shape[dim] > 1] for t in tensors]


def unify_sizes(tensors: list[Tensor], sizes: list[tuple[int, ...]]) -> None:
    """Say that inputs of one example size at dim 0 (or at dim 1) are of one size there always.

    Inputs of one batch would get a symbol each, and nothing could be concluded from any.
    """
    for dim in (0, 1):
        first: dict[int, Tensor] = {}
        for tensor, size in zip(tensors, sizes, strict=True):
            if len(size) > dim and size[dim] > 1:
                leader = first.setdefault(size[dim], tensor)
                if leader is not tensor:
                    torch._check(tensor.size(dim) == leader.size(dim))


def _signature_error(
    model: nn.Module,
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error: TypeError,
) -> InputError:
    given = ", ".join(chain((type(arg).__name__ for arg in args), (f"{name}=" for name in kwargs)))
    return InputError(
        f"cannot call {type(model).__name__}.forward({given}).",
        f"{error}; its signature is forward{signature}.",
        "pass the arguments that forward takes, by position or by keyword.",
    )
