"""Make no_grad and autocast regions plain ops, so that later passes see one flat graph."""

import operator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from tpcompile.autocast import explicit_casts
from tpcompile.errors import CaptureError
from tpcompile.program import Program
from tpcompile.program_edit import arguments, call, op
from tpcompile.torch_private import HigherOrderOperator

aten = torch.ops.aten
SET_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
AUTOCAST = torch.ops.higher_order.wrap_with_autocast


def inline_regions(program: Program) -> Program:
    """Inline every region: no_grad detaches what its ops read, autocast becomes explicit casts.

    Before:  %r = wrap_with_set_grad_enabled(False, region, %x)   %y = getitem(%r, 0)
    After:   %d = detach(%x)   %y = ... the region's ops on %d ...
    """
    graph = program.graph
    regions = program.extra.get("regions", {})
    for node in list(graph.nodes):
        if node.target not in (SET_GRAD, AUTOCAST):
            _check_plain(node)
            continue
        results = _Region(program, node).run(node, regions, _State(), arguments(node))
        for user in list(node.users):
            user.replace_all_uses_with(results[arguments(user)[1]])
            graph.erase_node(user)
        graph.erase_node(node)
    for node in graph.find_nodes(op="get_attr"):
        graph.erase_node(node)
    program.extra.pop("regions", None)
    return program


@dataclass(frozen=True)
class _State:
    """What the enclosing regions set."""

    grad: bool = True
    autocast: tuple[str, torch.dtype] | None = None


@dataclass
class _Region:
    """One outermost region being inlined before `before`."""

    program: Program
    before: fx.Node
    detached: dict[fx.Node, fx.Node] = field(default_factory=dict)
    casts: dict[Any, fx.Node] = field(default_factory=dict)

    def run(
        self, node: fx.Node, owner: dict[str, Any], state: _State, args: tuple[Any, ...]
    ) -> list[Any]:
        """Inline the region that `node` calls with `args`; the nodes of its outputs."""
        state, body_node, inputs = _enter(node, state, args)
        body = owner[op(body_node)]
        children = dict(body.named_children())
        env: dict[fx.Node, Any] = {}
        given = iter(inputs)
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                env[inner] = next(given)
            elif inner.op == "get_attr":
                env[inner] = inner
            elif inner.op == "output":
                return list(map_arg(arguments(inner)[0], env.__getitem__))
            elif inner.target in (SET_GRAD, AUTOCAST):
                mapped = map_arg(arguments(inner), env.__getitem__)
                env[inner] = self.run(inner, children, state, mapped)
            elif inner.target is operator.getitem and isinstance(env[arguments(inner)[0]], list):
                env[inner] = env[arguments(inner)[0]][arguments(inner)[1]]
            else:
                _check_plain(inner)
                env[inner] = self._copy(inner, env, state)
        raise AssertionError("a graph ends with an output node")

    def _copy(self, inner: fx.Node, env: dict[fx.Node, Any], state: _State) -> fx.Node:
        args, kwargs = map_arg((arguments(inner), inner.kwargs), env.__getitem__)
        if not state.grad:
            args, kwargs = map_arg((args, kwargs), lambda n: self._detach(n, inner))
        if state.autocast is not None:
            args, kwargs = explicit_casts(
                self.program, self.before, inner, args, kwargs, state.autocast, self.casts
            )
        with self.program.graph.inserting_before(self.before):
            node = self.program.graph.call_function(op(inner), args, kwargs)
        node.meta = dict(inner.meta)
        if not state.grad:
            self.detached[node] = node
        return node

    def _detach(self, node: fx.Node, like: fx.Node) -> fx.Node:
        val = node.meta.get("val")
        if not isinstance(val, Tensor) or not (val.is_floating_point() or val.is_complex()):
            return node
        leaf = self.program.leaves.get(node.name) if node.op == "placeholder" else None
        if leaf is not None and leaf.kind in ("buffer", "constant"):
            return node
        if node not in self.detached:
            self.detached[node] = call(
                self.program, self.before, aten.detach.default, (node,), {}, like
            )
        return self.detached[node]


def _enter(
    node: fx.Node, state: _State, args: tuple[Any, ...]
) -> tuple[_State, fx.Node, tuple[Any, ...]]:
    """(state inside, node of the body, the body's inputs) of a call of a region."""
    if node.target is SET_GRAD:
        enabled, body, *inputs = args
        return replace(state, grad=enabled), body, tuple(inputs)
    kind, dtype, enabled, _, body, *inputs = args
    if dtype is None:
        dtype = torch.get_autocast_dtype(kind)
    return replace(state, autocast=(kind, dtype) if enabled else None), body, tuple(inputs)


def _check_plain(node: fx.Node) -> None:
    transform = getattr(node.target, "__module__", "").startswith("torch._functorch")
    if transform or isinstance(node.target, HigherOrderOperator):
        where = node.meta.get("where") or node.meta.get("path") or "the model"
        raise CaptureError(
            f"cannot capture {'vmap' if transform else node.target}.",
            f"{where} calls it; it runs a Python function as one op.",
            "write it with plain torch ops.",
        )
