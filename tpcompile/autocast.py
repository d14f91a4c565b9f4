"""Autocast as explicit casts: what it would do to one op, found by watching it do so."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from .errors import CaptureError
from .program import Program
from .program_edit import call, fake_mode_for, fake_value, op
from .quiet import quiet
from .torch_private import OpOverload, TorchDispatchMode, pytree

aten = torch.ops.aten


def explicit_casts(
    program: Program,
    before: fx.Node,
    node: fx.Node,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    autocast: tuple[str, torch.dtype],
    made: dict[Any, fx.Node],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`args` and `kwargs` of `node`, cast before `before` as autocast (device type, dtype) would.

    `made` is this region's casts of placeholders: autocast casts a parameter once.

    Raises:
        CaptureError: Autocast does more to this op than cast what it reads.
    """
    if not isinstance(node.target, OpOverload):
        return args, kwargs
    nodes = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, fx.Node)]
    vals = {n: n.meta["val"] for n in nodes}
    if any(isinstance(v, Tensor) and v.device.type == "meta" for v in vals.values()):
        raise _meta_error(node)
    wanted = _casts(program, node, args, kwargs, autocast)
    plain = _casts(program, node, args, kwargs, None) if wanted else {}
    seen = {n: wanted[id(v)] for n, v in vals.items() if wanted.get(id(v)) != plain.get(id(v))}
    floats = [n for n, v in vals.items() if isinstance(v, Tensor) and v.is_floating_point()]
    # einsum and attention multiply inside: there autocast casts what no operand is
    for casts in (seen, dict.fromkeys(floats, autocast[1]), dict.fromkeys(floats, torch.float32)):
        if _gives(program, node, args, kwargs, casts):
            return _cast(program, before, node, args, kwargs, casts, made)
    raise CaptureError(
        f"cannot capture {node.target} under autocast.",
        f"{node.meta.get('where') or node.name}: autocast does more than cast what it reads.",
        "move it out of the autocast region.",
    )


def _gives(
    program: Program,
    node: fx.Node,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    casts: dict[fx.Node, torch.dtype],
) -> bool:
    """Whether the op on operands cast so gives the dtypes that it gave under autocast."""
    wanted = {id(n.meta["val"]): dtype for n, dtype in casts.items()}

    def on_cast(*call_args: Any, **call_kwargs: Any) -> Any:
        cast_args, cast_kwargs = pytree.tree_map_only(
            Tensor, lambda t: t.to(wanted.get(id(t), t.dtype)), (call_args, call_kwargs)
        )
        return op(node)(*cast_args, **cast_kwargs)

    try:
        with quiet():
            result = fake_value(on_cast, args, kwargs, fake_mode_for(program))
    except RuntimeError:
        return False
    return _dtypes(result) == _dtypes(node.meta["val"])


def _cast(
    program: Program,
    before: fx.Node,
    node: fx.Node,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    casts: dict[fx.Node, torch.dtype],
    made: dict[Any, fx.Node],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def cast(n: fx.Node) -> fx.Node:
        dtype = casts.get(n)
        if dtype is None or n.meta["val"].dtype == dtype:
            return n
        new = made.get((n, dtype)) or call(program, before, aten.to.dtype, (n, dtype), {}, node)
        if n.op == "placeholder":
            made[n, dtype] = new
        return new

    return map_arg((args, kwargs), cast)


def _dtypes(value: Any) -> list[torch.dtype]:
    return [t.dtype for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]


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
    autocast: tuple[str, torch.dtype] | None,
) -> dict[int, torch.dtype]:
    """Identity of each operand's value -> dtype it is cast to, by autocast or the op itself."""
    casts = _Casts()

    def watched(*call_args: Any, **call_kwargs: Any) -> None:
        with ExitStack() as stack:
            if autocast is not None:
                kind, dtype = autocast
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            stack.enter_context(casts)
            op(node)(*call_args, **call_kwargs)

    try:
        with quiet():
            fake_value(watched, args, kwargs, fake_mode_for(program))
    except RuntimeError:
        # operands of different dtypes, which only autocast can join
        if autocast is not None:
            raise
    return casts.found


def _meta_error(node: fx.Node) -> CaptureError:
    return CaptureError(
        "cannot capture autocast on the meta device.",
        f"{node.meta.get('where') or node.name} runs under autocast, which has no meta rules.",
        "capture with parameters on a real device, or cast in the model.",
    )
