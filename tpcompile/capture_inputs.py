"""A model's inputs as flat tensors, a key for the rest, and the dims that may vary."""

import inspect
from collections.abc import Hashable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .caches import LENGTHS
from .errors import InputError
from .structure import Flat, Structure, is_tensor, take_apart


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
    bound = bind(model, args, kwargs)
    return bound.leaves, call_key(bound)


def call_key(bound: Flat) -> Hashable:
    """The key of `flatten_inputs`."""
    tensors: list[Tensor] = bound.leaves
    kinds = tuple((t.dtype, t.ndim, t.requires_grad) for t in tensors)
    return bound.structure, kinds, autocast_state(tensors)


def bind_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor], Structure, list[str]]:
    """(tensors, structure, names); the structure rebuilds `(args, kwargs)` in one fixed order."""
    bound = bind(model, args, kwargs)
    return bound.leaves, bound.structure, bound.paths


def bind(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flat:
    """The arguments of a call, taken apart in one fixed order, the tensors named.

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
            keywords[name] = _sorted(value)
    flat = take_apart((tuple(map(_sorted, positional)), keywords), is_tensor)
    flat.paths = [_input_name(path, names) for path in flat.paths]
    return flat


def _sorted(value: Any) -> Any:
    """Dicts in one order: some callers make them from sets, in an order that differs by rank."""
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return value


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


SizeGroups = dict[int, str]
"""Dim of an input that may vary from call to call -> the group of dims that are of one size."""


def size_groups(bound: Flat) -> list[SizeGroups]:
    """Dims of each input that may vary: batch and sequence, which come first in nearly every model.

    Not where they are 0 or 1, which changes what ops mean; the length of a cache may be 1.
    Inputs of one group and one example size have one size always.
    """
    found = []
    for tensor, entry in zip(bound.leaves, bound.entries, strict=True):
        groups = {0: "batch", 1: "sequence"}
        if entry:
            groups = _entry_groups(tensor, entry)
        elif bound.caches and tensor.ndim == 4 and tensor.shape[1] == 1:
            groups = {0: "batch", 2: "sequence", 3: "length"}  # a mask over what is cached
        found.append(
            {
                dim: f"{group} {tensor.shape[dim]}" if group else ""
                for dim, group in groups.items()
                if dim < tensor.ndim and tensor.shape[dim] >= (1 if group == "length" else 2)
            }
        )
    return found


def _entry_groups(tensor: Tensor, entry: str) -> SizeGroups:
    """Groups of a cache's tensor, before their sizes are told apart."""
    name = entry.rpartition(".")[2]
    if name in LENGTHS:
        return {0: "batch" if name == "batch_size" else "length"}
    if tensor.ndim == 4:
        return {0: "batch", 2: "length" if name in ("keys", "values") else ""}
    return {0: "batch", 1: ""}


def unify_sizes(tensors: list[Tensor], groups: list[SizeGroups]) -> None:
    """Say which inputs are of one size always.

    Inputs of one batch would get a symbol each, and nothing could be concluded from any.
    """
    first: dict[str, Any] = {}
    for tensor, dims in zip(tensors, groups, strict=True):
        for dim, group in dims.items():
            size = tensor.size(dim)
            if group and first.setdefault(group, size) is not size:
                torch._check(size == first[group])


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
