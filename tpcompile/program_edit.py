"""Insert a call into a program with its fake value and its place in the user's model."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx

from .program import Program
from .torch_private import FakeTensor, pytree

LOCATION = ("path", "where", "modules", "calls")
"""Meta entries a new node takes over from the node it is made for."""


def call(
    program: Program,
    before: fx.Node,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    like: fx.Node,
) -> fx.Node:
    """A new node `target(*args, **kwargs)` inserted before `before`.

    Its `val` is computed by running `target` on the fake values of its arguments; its location
    is that of `like`.  `target` may be any function that works on fake tensors.
    """
    with program.graph.inserting_before(before):
        node = program.graph.call_function(target, args, kwargs)
    node.meta["val"] = fake_value(target, args, kwargs, fake_mode_for(program))
    copy_location(like, node)
    return node


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """Positional arguments of a call; torch types them as a union that fits no use."""
    return node.args


def op(node: fx.Node) -> Any:
    """Target of a call, which is no name."""
    return node.target


def copy_location(source: fx.Node, node: fx.Node) -> None:
    """Say that `node` comes from where `source` comes from."""
    node.meta.update({key: source.meta[key] for key in LOCATION if key in source.meta})


def fake_value(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any
) -> Any:
    """What `target` gives for the fake values of the nodes among its arguments.

    Runs without autograd, so that values hold on to no graph, and without the autocast that may
    be on around the caller: the graph says itself what is cast.
    """
    call_args, call_kwargs = pytree.tree_map_only(
        fx.Node, lambda node: node.meta["val"], (args, kwargs)
    )
    with ExitStack() as stack:
        if mode is not None:
            stack.enter_context(mode)
        stack.enter_context(torch.no_grad())
        for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            stack.enter_context(torch.autocast(kind, enabled=False))
        return target(*call_args, **call_kwargs)


def fake_mode_for(program: Program) -> Any:
    """The fake mode all values of a program live in; None for a graph without fake tensors."""
    mode = program.extra.get("fake_mode")
    if mode is None:
        mode = next(filter(None, map(_mode_of, program.graph.nodes)), None)
        program.extra["fake_mode"] = mode
    return mode


def _mode_of(node: fx.Node) -> Any:
    for val in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(val, FakeTensor):
            return val.fake_mode
    return None
