"""What a model may not have or do, because a graph of it would silently leave it out."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from tpcompile.errors import CaptureError, InputError


def check_module(model: nn.Module) -> None:
    """Refuse backward hooks of modules: a graph has no modules in its backward pass.

    Raises:
        CaptureError: Naming the first module that has one.
    """
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"cannot capture {type(model).__name__}.",
                f"{name or 'the model'} has a backward hook, which the graph would not call",
                "remove it, or register it on a repeated block after shard",
            )


def check_before_shard(model: nn.Module, blocks: set[str]) -> None:
    """Refuse what would be lost, or happen twice, when `model` is changed in place.

    Raises:
        InputError: It has a forward of its own, hooks on blocks, or memory shared without a tie.
    """
    asked = f"shard {type(model).__name__}"
    if "forward" in vars(model):
        raise InputError(
            asked,
            "this object has a forward of its own, which a sharded one would not run",
            "define forward in its class",
        )
    for path in sorted(blocks):
        block = model.get_submodule(path)
        if block._forward_hooks or block._forward_pre_hooks:
            raise InputError(
                asked,
                f"{path} has forward hooks: they would be in the graph, and be called beside it",
                "register hooks on blocks after shard",
            )
    check_memory(model, asked)


def check_memory(model: nn.Module, asked: str) -> None:
    """Refuse parameters that share memory, or do with a buffer, and are not one object.

    Raises:
        InputError: Naming two of them.
    """
    for one, other in _overlapping(model):
        raise InputError(
            asked,
            f"{one} and {other} share memory, but are two tensors; sharded, they would part",
            f"tie them as one object, as in module.{one.rpartition('.')[2]} = other.weight",
        )


def _overlapping(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of different parameters, or of one and a buffer, that have bytes in common."""
    named = [*model.named_parameters(), *model.named_buffers()]
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + _extent(t), isinstance(t, nn.Parameter), name)
        for name, t in named
        if t.numel() and not t.is_meta and t.untyped_storage().size()
    )
    for (_, end, first, one), (begin, _, second, other) in pairwise(spans):
        if begin < end and (first or second):
            yield one, other


def _extent(t: Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last one."""
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.element_size()


@contextmanager
def refuse_while_tracing(where: Any) -> Iterator[None]:
    """Raise on what tracing drops: hooks of tensors, seeds, and random numbers of Python.

    `where()` is the line of the model that is running.
    """
    register, seed = Tensor.register_hook, torch.manual_seed

    def refuse(what: str, fix: str) -> NoReturn:
        raise CaptureError("cannot capture the model.", f"{where()}: {what}", fix)

    def register_hook(self: Tensor, hook: Any) -> Any:
        refuse("the graph would not call this hook", "compute what it does in the forward")

    def manual_seed(value: Any) -> Any:
        refuse("the graph would not set this seed", "set it before the call")

    before = _python_random()
    Tensor.register_hook, torch.manual_seed = register_hook, manual_seed  # type: ignore
    try:
        yield
    finally:
        Tensor.register_hook, torch.manual_seed = register, seed  # type: ignore
    if _python_random() != before:
        raise CaptureError(
            "cannot capture the model.",
            "its forward draws random numbers of Python or numpy, which the graph would repeat",
            "draw them with torch, or before the call",
        )


def _python_random() -> tuple[Any, ...]:
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2]
