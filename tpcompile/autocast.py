"""Autocast as explicit casts: what it would do to one op, found by watching it do so."""

from typing import Any

import torch
from torch import Tensor, fx

from .errors import CaptureError
from .program import Program
from .program_edit import call, fake_mode_for
from .torch_private import OpOverload, TorchDispatchMode, pytree

aten = torch.ops.aten


def explicit_casts(
    program: Program,
    before: fx.Node,
    node: fx.Node,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    autocast: tuple[str, torch.dtype],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`args` and `kwargs` of `node`, cast before `before` as autocast (device type, dtype) would.

    Raises:
        CaptureError: Autocast does more to this op than cast what it reads.
    """
    if not isinstance(node.target, OpOverload):
        return args, kwargs
    nodes = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, fx.Node)]
    vals = {n: n.meta["val"] for n in nodes}
    if any(isinstance(v, Tensor) and v.device.type == "meta" for v in vals.values()):
        raise _meta_error(node)
    wanted = _casts(program, node, args, kwargs, autocast, True)
    plain = _casts(program, node, args, kwargs, autocast, False)
    made: dict[fx.Node, fx.Node] = {}
    for n, val in vals.items():
        dtype = wanted.get(id(val))
        if dtype is not None and plain.get(id(val)) != dtype and n not in made:
            made[n] = call(program, before, aten.to.dtype, (n, dtype), {}, node)
    return fx.node.map_arg((args, kwargs), lambda n: made.get(n, n))


class _Casts(TorchDispatchMode):
    """Notes the dtype that each tensor is first cast to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, torch.dtype] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten._to_copy.default and kwargs.get("dtype") is not None:
            self.found.setdefault(id(args[0]), kwargs["dtype"])
        return func(*args, **kwargs)


def _casts(
    program: Program,
    node: fx.Node,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    autocast: tuple[str, torch.dtype],
    enabled: bool,
) -> dict[int, torch.dtype]:
    kind, dtype = autocast
    call_args, call_kwargs = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    mode = fake_mode_for(program)
    with mode, torch.no_grad(), torch.autocast(kind, dtype, enabled, cache_enabled=False):
        with _Casts() as casts:
            node.target(*call_args, **call_kwargs)  # type: ignore[operator]
    return casts.found


def _meta_error(node: fx.Node) -> CaptureError:
    return CaptureError(
        "cannot capture autocast on the meta device.",
        f"{node.meta.get('where') or node.name} runs under autocast, which has no meta rules.",
        "capture with parameters on a real device, or cast in the model.",
    )
