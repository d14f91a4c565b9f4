"""Views: whether an op's result shares its operand's memory, and how to write through it."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from .errors import CaptureError
from .program import Program
from .program_edit import arguments, fake_mode_for, fake_value, op
from .rewrites import Rewriter, argument
from .torch_private import OpOverload, same_storage

aten = torch.ops.aten

Scatter = Callable[[Rewriter, fx.Node, fx.Node, fx.Node, fx.Node], fx.Node]
"""`scatter(r, view, parent, current, new)`: the parent's value once `view` of it is `new`, its
value until then being `current`."""
SCATTERS: dict[Any, Scatter] = {}

DROPOUTS = {
    aten.dropout.default,
    aten.alpha_dropout.default,
    aten.feature_dropout.default,
    aten.feature_alpha_dropout.default,
}
"""Ops that give their operand back in eval mode: neither schemas nor fake tensors say so."""


def is_view(program: Program, node: fx.Node) -> bool:
    """Whether a call's result (or each item of it) shares memory with its first operand."""
    x = arguments(node)[0] if arguments(node) else None
    if not isinstance(x, fx.Node) or not isinstance(node.target, OpOverload):
        return False
    # lift_fresh's operand is a literal of the source, made anew in every call
    if node.target is aten.lift_fresh.default:
        return False
    if is_idle_dropout(node):
        return True
    if all(r.alias_info is None for r in op(node)._schema.returns):
        return False
    result = fake_value(node.target, arguments(node), node.kwargs, fake_mode_for(program))
    first = result if isinstance(result, Tensor) else next(iter(result), None)
    return first is not None and same_storage(x.meta["val"], first)


def is_idle_dropout(node: fx.Node) -> bool:
    """Whether a call is a dropout that gives back its very operand."""
    if node.target not in DROPOUTS:
        return False
    return argument(node, 1, "p") == 0 or not argument(node, 2, "train")


def scatter(r: Rewriter, view: fx.Node, parent: fx.Node, current: fx.Node, new: fx.Node) -> fx.Node:
    """The value of `parent`, so far `current`, once its view `view` has the value `new`."""
    rule = SCATTERS.get(view.target)
    if rule is None:
        raise CaptureError(
            "cannot capture an in-place op on this view.",
            f"{view.meta.get('where') or view.name} writes through {view.target}.",
            "write to a copy (clone) or use the op that returns a new tensor.",
        )
    return rule(r, view, parent, current, new)


def scatter_rule(*ops: Any) -> Callable[[Scatter], Scatter]:
    """Register the decorated function as the way to write through each op's view."""

    def register(fn: Scatter) -> Scatter:
        SCATTERS.update(dict.fromkeys(ops, fn))
        return fn

    return register


@scatter_rule(
    aten.detach.default,
    aten.alias.default,
    aten.contiguous.default,
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten.to.other,
    aten.type_as.default,
    aten.positive.default,
    *DROPOUTS,
)
def _same(r: Rewriter, view: fx.Node, parent: fx.Node, current: fx.Node, new: fx.Node) -> fx.Node:
    return new


@scatter_rule(
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.view_as.default,
    aten.reshape_as.default,
    aten.ravel.default,
)
def _reshaped(
    r: Rewriter, view: fx.Node, parent: fx.Node, current: fx.Node, new: fx.Node
) -> fx.Node:
    return r(aten.reshape.default, new, r.sizes(parent))


@scatter_rule(
    aten.transpose.int,
    aten.swapaxes.default,
    aten.swapdims.default,
    aten.t.default,
    aten.mT.default,
    aten.numpy_T.default,
)
def _self_inverse(
    r: Rewriter, view: fx.Node, parent: fx.Node, current: fx.Node, new: fx.Node
) -> fx.Node:
    return r(view.target, new, *arguments(view)[1:])


@scatter_rule(aten.permute.default)
def _permuted(
    r: Rewriter, view: fx.Node, parent: fx.Node, current: fx.Node, new: fx.Node
) -> fx.Node:
    order = [dim % len(arguments(view)[1]) for dim in arguments(view)[1]]
    return r(aten.permute.default, new, [order.index(dim) for dim in range(len(order))])


@scatter_rule(aten.movedim.int, aten.movedim.intlist, aten.moveaxis.int, aten.moveaxis.intlist)
def _moved(r: Rewriter, view: fx.Node, parent: fx.Node, current: fx.Node, new: fx.Node) -> fx.Node:
    _, source, destination = arguments(view)
    return r(view.target, new, destination, source)


@scatter_rule(aten.slice.Tensor)
def _sliced(r: Rewriter, view: fx.Node, parent: fx.Node, current: fx.Node, new: fx.Node) -> fx.Node:
    return r(aten.slice_scatter.default, current, new, *arguments(view)[1:], **view.kwargs)


@scatter_rule(aten.narrow.default)
def _narrowed(
    r: Rewriter, view: fx.Node, parent: fx.Node, current: fx.Node, new: fx.Node
) -> fx.Node:
    _, dim, begin, length = arguments(view)
    end = (
        length
        if begin == 0
        else r(operator.add, begin, length)
        if _has_node(view)
        else (begin % parent.meta["val"].shape[dim] + length)
    )
    return r(aten.slice_scatter.default, current, new, dim, begin, end)


@scatter_rule(aten.select.int)
def _selected(
    r: Rewriter, view: fx.Node, parent: fx.Node, current: fx.Node, new: fx.Node
) -> fx.Node:
    return r(aten.select_scatter.default, current, new, *arguments(view)[1:])


@scatter_rule(aten.diagonal.default)
def _diagonal(
    r: Rewriter, view: fx.Node, parent: fx.Node, current: fx.Node, new: fx.Node
) -> fx.Node:
    return r(aten.diagonal_scatter.default, current, new, *arguments(view)[1:], **view.kwargs)


@scatter_rule(aten.view_as_real.default)
def _as_real(
    r: Rewriter, view: fx.Node, parent: fx.Node, current: fx.Node, new: fx.Node
) -> fx.Node:
    return r(aten.view_as_complex.default, new)


@scatter_rule(aten.view_as_complex.default)
def _as_complex(
    r: Rewriter, view: fx.Node, parent: fx.Node, current: fx.Node, new: fx.Node
) -> fx.Node:
    return r(aten.view_as_real.default, new)


@scatter_rule(operator.getitem)
def _item(r: Rewriter, view: fx.Node, parent: fx.Node, current: fx.Node, new: fx.Node) -> fx.Node:
    """`view` is item i of a split or an unbind of what `parent` splits; `parent` is that list."""
    index = arguments(view)[1]
    if parent.target is aten.unbind.int:
        dim = argument(parent, 1, "dim", 0)
        return r(aten.select_scatter.default, current, new, dim, index)
    dim = argument(parent, 2, "dim", 0)
    sizes = [piece.shape[dim] for piece in parent.meta["val"]]
    before = sum(sizes[:index])
    if not isinstance(before, int) or not isinstance(sizes[index], int):
        raise CaptureError(
            "cannot capture an in-place op on a piece of a dim that varies.",
            f"{parent.meta.get('where') or parent.name} splits it.",
            "write to a copy (clone) or use torch.cat of the new pieces.",
        )
    return r(aten.slice_scatter.default, current, new, dim, before, before + sizes[index])


def _has_node(view: fx.Node) -> bool:
    return any(isinstance(arg, fx.Node) for arg in arguments(view)[2:])
