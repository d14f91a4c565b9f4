"""Bring the graph to few op spellings, so that rules and passes need to know only those."""

import operator
import sys
from typing import Any

import torch
from torch import Tensor, fx

import tpcompile.rewrites_matmul  # noqa: F401  registers rewrites
from tpcompile.program import Program
from tpcompile.program_edit import arguments, op
from tpcompile.rewrites import REWRITES, Rewriter, same_shape
from tpcompile.torch_private import OpOverload
from tpcompile.views import is_idle_dropout

aten = torch.ops.aten

ASSERTIONS = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.default,
    aten._assert_async.msg,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}
COPIES = {aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default}
RESHAPES = {aten.reshape.default, aten.view.default, aten.expand.default}
CASTS = {aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other}
STRIDED = {aten.view_as_complex.default, aten.view.dtype, aten.as_strided.default}
"""Ops whose meaning depends on their operand's strides."""


def normalize(program: Program) -> Program:
    """Drop what does nothing and spell the rest in one way (see `rewrites`).

    Before:  %2 = to.dtype(%1, float32)   %3 = linear(%2, %w, %b)   %4 = view(%3, [2, 4, 8])
    After:   %3 = linear(%1, %w)   %4 = add.Tensor(%3, %b)   %5 = reshape(%4, [2, 4, 8])
    """
    graph = program.graph
    rewriter = Rewriter(program)
    node = next(iter(graph.nodes))
    while node.op != "root":
        before, after = node.prev, node.next
        if node.op == "call_function" and _rewrite(rewriter, node):
            # what the rewrite made may be rewritten again
            node = before.next
            continue
        rewriter.note_size(node)
        node = after
    graph.eliminate_dead_code()
    graph.lint()
    return program


def _rewrite(rewriter: Rewriter, node: fx.Node) -> bool:
    """Replace one node; False where it stays."""
    if node.target in ASSERTIONS:
        node.graph.erase_node(node)
        return True
    new = _without_effect(node)
    if new is None:
        rewrite = REWRITES.get(node.target)
        new = rewrite(rewriter.at(node), node) if rewrite else None
    if new is None:
        _order_kwargs(node)
        return False
    if isinstance(new, list):
        _replace_items(node, new)
    else:
        node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return True


def _replace_items(node: fx.Node, items: list[fx.Node]) -> None:
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(items[arguments(user)[1]])
        node.graph.erase_node(user)


def _without_effect(node: fx.Node) -> fx.Node | None:
    """What a node gives back unchanged, or None."""
    x = arguments(node)[0] if arguments(node) else None
    if not isinstance(x, fx.Node) or not isinstance(x.meta.get("val"), Tensor):
        return None
    old: Tensor = x.meta["val"]
    new: Any = node.meta.get("val")
    target = node.target
    if target in COPIES:
        return x
    if target in RESHAPES:
        return x if same_shape(old, new) else None
    if target in CASTS:
        same = old.dtype == new.dtype and old.device == new.device
        return x if same and not _changes_strides(node) else None
    if is_idle_dropout(node):
        return x
    if target is aten.slice.Tensor:
        return x if _is_full_slice(node, old) else None
    if target is aten.contiguous.default or target is aten.clone.default:
        return x if _is_copy_unseen(node, old) else None
    return None


def _changes_strides(node: fx.Node) -> bool:
    return node.kwargs.get("memory_format") not in (None, torch.preserve_format) or any(
        user.target in STRIDED for user in node.users
    )


def _is_full_slice(node: fx.Node, x: Tensor) -> bool:
    given, defaults = arguments(node)[1:], (0, None, None, 1)
    spelled: list[Any] = [*given, *defaults[len(given) :]]
    dim, begin, end, step = spelled
    if begin not in (0, None) or step != 1 or node.kwargs:
        return False
    if end is None or end == sys.maxsize:
        return True
    size: Any = x.shape[dim]
    return isinstance(end, int) and isinstance(size, int) and end >= size


def _is_copy_unseen(node: fx.Node, x: Tensor) -> bool:
    """Whether nobody can tell a copy from the original: values are never written to any more."""
    if any(user.op == "output" or user.target in STRIDED for user in node.users):
        return False
    return x.is_contiguous() or all(user.target in RESHAPES for user in node.users)


def _order_kwargs(node: fx.Node) -> None:
    """Arguments by position as far as they go, the rest in the schema's order."""
    if not node.kwargs or not isinstance(node.target, OpOverload):
        return
    args, kwargs = list(arguments(node)), dict(node.kwargs)
    ordered: dict[str, Any] = {}
    for i, argument in enumerate(op(node)._schema.arguments):
        if argument.name not in kwargs:
            continue
        if i == len(args) and not argument.kwarg_only:
            args.append(kwargs.pop(argument.name))
        else:
            ordered[argument.name] = kwargs.pop(argument.name)
    node.args, node.kwargs = tuple(args), ordered | kwargs
