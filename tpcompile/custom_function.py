"""A custom autograd function as one op, run as its author wrote it, forward and backward.

Tracing would keep what its forward computes and put autograd's backward in place of its own.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from tpcompile.rule import RULES, Rule, dims, rule_for
from tpcompile.torch_private import TorchDispatchMode, apply_function, same_storage

_SHAPES = ((2, 3), (5, 7))
_OPS: dict[Any, Any] = {}


def elementwise_op(cls: Any, args: Sequence[Any]) -> Any:
    """The op that takes the tensors of `args` and gives `cls.apply(*args)`, or None.

    None unless all tensors have one shape and both directions map elements to elements, which
    running them on a small meta tensor shows: every op that they call has a rule that says so.
    """
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    others = tuple(None if isinstance(arg, Tensor) else arg for arg in args)
    places = tuple(isinstance(arg, Tensor) for arg in args)
    if not tensors or any(t.shape != tensors[0].shape for t in tensors):
        return None
    key = (cls, places, repr(others), tuple((t.dtype, t.requires_grad) for t in tensors))
    if key not in _OPS:
        # The modes of the trace that asks are those of its thread.
        with ThreadPoolExecutor(1) as pool:
            fits = pool.submit(_maps_elements, cls, args).result()
        _OPS[key] = _define(cls, args, f"function{len(_OPS)}_{cls.__name__}") if fits else None
    return _OPS[key]


def _call(cls: Any, args: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
    given = iter(tensors)
    return apply_function(cls, *(next(given) if isinstance(a, Tensor) else a for a in args))


def _maps_elements(cls: Any, args: Sequence[Any]) -> bool:
    """Whether it does the same on two shapes, element by element: no number is from a shape."""
    first, second = (_calls_on(shape, cls, args) for shape in _SHAPES)
    return first is not None and first == second


def _calls_on(shape: tuple[int, ...], cls: Any, args: Sequence[Any]) -> list[str] | None:
    """The ops that it calls and their numbers; None where one does not map elements."""
    metas = [
        torch.empty(shape, dtype=arg.dtype, device="meta", requires_grad=arg.requires_grad)
        for arg in args
        if isinstance(arg, Tensor)
    ]
    try:
        with _Elementwise(shape) as seen:
            out = _call(cls, args, metas)
        if not isinstance(out, Tensor) or out.shape != shape:
            return None
        if out.requires_grad:
            grad = torch.empty_like(out)
            with seen:
                torch.autograd.grad(out, [m for m in metas if m.requires_grad], grad)
    except Exception:  # it does what meta tensors, or all of its operands, do not allow
        return None
    return seen.calls if seen.all and all(m._version == 0 for m in metas) else None


class _Elementwise(TorchDispatchMode):
    """Watches whether every op takes and gives elements of one shape, place by place."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.all = shape, True
        self.calls: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        rule = rule_for(func, args, kwargs or {})
        given = (*args, *(kwargs or {}).values())
        self.calls.append(f"{func} {[_number(a) for a in given]}")
        whole_shape = isinstance(out, Tensor) and out.shape in (self.shape, ())
        self.all &= whole_shape and rule is not None and _is_elementwise(rule)
        return out


def _number(arg: Any) -> Any:
    """What an argument is worth, "" for a tensor whose values are not known here."""
    if isinstance(arg, Tensor):
        return "" if arg.is_meta or arg.ndim else arg.item()
    return arg


def _is_elementwise(rule: Rule) -> bool:
    if rule.whole or rule.local is not None or len(rule.outs) != 1:
        return False
    return all(spec in (rule.outs[0], ()) for spec in rule.ins)


def _define(cls: Any, args: Sequence[Any], name: str) -> Any:
    """Register the op and its rule."""

    def forward(xs: list[Tensor]) -> Tensor:
        with torch.no_grad():
            out = _call(cls, args, xs)
        # an op may not give back its operand
        return out.clone() if any(same_storage(out, x) for x in xs) else out

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[0])

    def backward(ctx: Any, grad: Tensor) -> list[Tensor | None]:
        # Forward once more: what the author's forward saved for his backward is his to know.
        xs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = _call(cls, args, xs)
        trained = [x for x in xs if x.requires_grad]
        grads = iter(torch.autograd.grad(out, trained, grad, allow_unused=True))
        return [next(grads) if x.requires_grad else None for x in xs]

    op = torch.library.custom_op(
        f"tpcompile::{name}", forward, mutates_args=(), schema="(Tensor[] xs) -> Tensor"
    )
    op.register_fake(forward)
    op.register_autograd(backward, setup_context=keep)
    overload = getattr(torch.ops.tpcompile, name).default
    RULES[overload] = _rule
    return overload


def _rule(xs: Sequence[Any]) -> Rule:
    """Each: [*b] -> [*b]."""
    spec = dims(*(f"b{i}" if size != 1 else "" for i, size in enumerate(xs[0].shape)))
    return Rule((spec,) * len(xs), (spec,))
