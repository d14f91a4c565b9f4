"""Trace a graph from Dynamo to ATen training ops, on the fake values that Dynamo made."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from tpcompile.capture_program import where_of
from tpcompile.custom_function import elementwise_op
from tpcompile.errors import CaptureError
from tpcompile.program_edit import arguments
from tpcompile.quiet import quiet
from tpcompile.torch_private import HigherOrderOperator


class _Lowering(fx.Interpreter):
    """Runs Dynamo's graph on its fake values; what has no ATen form becomes something that has."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.gm = gm

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.higher_order.tag_activation_checkpoint:
            body, *inputs = args
            return _Lowering(body).run(*inputs)
        if target is torch.ops.higher_order.autograd_function_apply:
            return _custom_function(args)
        if isinstance(target, HigherOrderOperator):
            raise CaptureError(
                f"shard a graph that calls {target}.",
                "it runs a Python function as one op",
                "write it with plain torch ops.",
            )
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().call_method(target, args, kwargs)
        # A float of the model that Dynamo made an input: a number to us, with a guard on it.
        return float(value) if isinstance(value, torch.SymFloat) else value


def trace(gm: fx.GraphModule, values: Sequence[Any], mode: Any) -> fx.GraphModule:
    """The graph of ATen training ops of a graph from Dynamo; `values` are its fake inputs."""
    with mode, torch.enable_grad(), preserve_node_meta(), quiet():
        return make_fx(_Lowering(gm).run, tracing_mode="real", pre_dispatch=True)(*values)


def _custom_function(args: tuple[Any, ...]) -> Any:
    """A custom autograd function of the user: tracing it would lose its backward."""
    forward, backward, *inputs = args
    places = forward.graph.find_nodes(op="placeholder")
    given = [x if _is_read(n, x) else None for n, x in zip(places, inputs, strict=True)]

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *xs: Any) -> Any:
            output, ctx.saved = fx.Interpreter(forward).run(*xs)
            return output[0] if isinstance(output, (tuple, list)) and len(output) == 1 else output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return fx.Interpreter(backward).run(*grads, *ctx.saved)

    sizes = any(isinstance(x, torch.SymInt) for x in given)
    found = None if sizes else elementwise_op(Function, given)
    if found is None:
        raise CaptureError(
            "shard a graph with a custom autograd function.",
            f"{where_of(_trace_text(forward)) or 'the model'}: its backward would be lost, as it "
            "does not map elements to elements.",
            "write it with plain torch ops, or as a torch.library.custom_op with its own backward.",
        )
    output = found([x for x in given if isinstance(x, Tensor)])
    body = arguments(next(iter(reversed(forward.graph.nodes))))[0][0]
    return (output,) if isinstance(body, (tuple, list)) else output


def _is_read(node: fx.Node, value: Any) -> bool:
    """Whether a custom function reads an argument; not where it only keeps a size."""
    return any(isinstance(value, Tensor) or user.op != "output" for user in node.users)


def _trace_text(gm: fx.GraphModule) -> str:
    return next(filter(None, (n.meta.get("stack_trace") for n in gm.graph.nodes)), "")


def set_locations(graph: fx.Graph, paths: Mapping[int, str]) -> None:
    """Reduce each node's meta to what a Program has."""
    for node in graph.nodes:
        modules, calls = [], []
        for key in node.meta.get("nn_module_stack") or {}:
            number, _, again = key.partition("@")
            path = paths.get(int(number)) if number.isdecimal() else None
            if path is not None:
                modules.append(path)
                calls.append(int(again or 0))
        where = where_of(node.meta.get("stack_trace") or "")
        meta = {"modules": tuple(modules), "calls": tuple(calls), "where": where}
        meta["path"] = modules[-1] if modules else ""
        if "val" in node.meta:
            meta["val"] = node.meta["val"]
        node.meta = meta
