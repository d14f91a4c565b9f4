"""`generate` of a sharded model: all ranks of the axis sample the same tokens."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpcompile.agreement import agree, tensor_digest
from tpcompile.parameters import sharded_for

GENERATING: ContextVar[bool] = ContextVar("generating", default=False)
"""Whether `generate` runs: what a forward leaves in the model counts for the next one."""


def in_step(generate: Callable[..., Any]) -> Callable[..., Any]:
    """A `generate` method that first checks that all ranks ask the same, and shares rank 0's seed.

    Raises:
        RankMismatchError: Ranks of the axis have other prompts or settings.
    """

    @functools.wraps(generate)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        sharded = sharded_for(self)
        assert sharded is not None
        group = sharded.mesh.get_group()
        given = {**{f"argument {i}": a for i, a in enumerate(args)}, **kwargs}
        agree(
            f"generate with a sharded {type(self).__name__}",
            lambda: True,
            lambda _: {name: _digest(value) for name, value in given.items()},
            lambda _: (),
            group,
        )
        if hasattr(self, "generation_config"):
            # Of Hugging Face's own accord on GPUs, for static caches; a trace cannot take a cache.
            kwargs.setdefault("disable_compile", True)
        token = GENERATING.set(True)
        try:
            with _seed_of_first(group, sharded.mesh.device_type):
                return generate(self, *args, **kwargs)
        finally:
            GENERATING.reset(token)

    return wrapped


@contextmanager
def _seed_of_first(group: dist.ProcessGroup, device_type: str) -> Iterator[None]:
    """Draw what rank 0 draws; a rank whose own stream is another goes on with that afterwards."""
    mine = _random_state(device_type)
    first: list[Any] = [mine]
    dist.broadcast_object_list(first, group_src=0, group=group)
    if all(torch.equal(a, b) for a, b in zip(mine, first[0], strict=True)):
        yield
        return
    try:
        _set_random_state(first[0], device_type)
        yield
    finally:
        _set_random_state(mine, device_type)


def _random_state(device_type: str) -> tuple[Tensor, ...]:
    cuda = (torch.cuda.get_rng_state(),) if device_type == "cuda" else ()
    return torch.get_rng_state(), *cuda


def _set_random_state(state: tuple[Tensor, ...], device_type: str) -> None:
    torch.set_rng_state(state[0])
    if device_type == "cuda":
        torch.cuda.set_rng_state(state[1])


def _digest(value: Any) -> str:
    """What must be equal on all ranks of an argument."""
    if isinstance(value, Tensor):
        return tensor_digest(value)
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    if hasattr(value, "to_dict"):
        return f"{type(value).__name__};{sorted(value.to_dict().items(), key=str)}"
    return type(value).__name__
