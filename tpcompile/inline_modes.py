"""Gradient and autocast modes that a graph switches on and off, as plain ops."""

from typing import Any

import torch
from torch import Tensor, fx

from tpcompile.autocast import explicit_casts
from tpcompile.program import Program
from tpcompile.program_edit import arguments, call
from tpcompile.torch_private import (
    enter_autocast_call,
    exit_autocast_call,
    set_grad_enabled_call,
)

aten = torch.ops.aten


def inline_modes(program: Program, autocast: tuple[str, torch.dtype] | None) -> None:
    """Detach what ops under no_grad read, and cast what ops under autocast do.

    Before:  set_grad_enabled(False)   %y = linear(%x, %w)   set_grad_enabled(True)
    After:   %d = detach(%x)   %e = detach(%w)   %y = linear(%d, %e)

    `autocast` is the (device type, dtype) that is on around the graph, if any.
    """
    grad, stack, detached, casts = True, [autocast], {}, {}
    graph = program.graph
    for node in list(program.calls()):
        if node.target is set_grad_enabled_call:
            grad = bool(arguments(node)[0])
        elif node.target is enter_autocast_call:
            kind, dtype, enabled, *_ = arguments(node)
            dtype = dtype or torch.get_autocast_dtype(kind)
            stack.append((kind, dtype) if enabled else None)
        elif node.target is exit_autocast_call:
            stack.pop()
        else:
            if not grad:
                node.args, node.kwargs = fx.map_arg(
                    (node.args, node.kwargs), lambda n, to=node: _detach(program, n, to, detached)
                )
                detached[node] = node
            if stack[-1] is not None and isinstance(node.meta.get("val"), (Tensor, tuple, list)):
                node.args, node.kwargs = explicit_casts(
                    program, node, node, arguments(node), node.kwargs, stack[-1], casts
                )
    for node in reversed(list(program.calls())):
        if node.target in (set_grad_enabled_call, enter_autocast_call, exit_autocast_call):
            graph.erase_node(node)


def _detach(program: Program, n: fx.Node, before: fx.Node, known: dict[Any, fx.Node]) -> fx.Node:
    val = n.meta.get("val")
    leaf = program.leaves.get(n.name)
    if (
        not isinstance(val, Tensor)
        or not (val.is_floating_point() or val.is_complex())
        or (leaf is not None and leaf.kind in ("buffer", "constant"))
    ):
        return n
    if n not in known:
        known[n] = call(program, before, aten.detach.default, (n,), {}, before)
    return known[n]
