"""In-place ops: what they write, and the op that returns the same as a new value."""

from typing import Any

import torch
from torch import Tensor, fx

from .errors import CaptureError
from .program_edit import arguments, op
from .rewrites import Rewriter
from .torch_private import OpOverload

aten = torch.ops.aten

FUNCTIONAL: dict[Any, Any] = {
    aten.__iand__.Tensor: aten.bitwise_and.Tensor,
    aten.__iand__.Scalar: aten.bitwise_and.Scalar,
    aten.__ior__.Tensor: aten.bitwise_or.Tensor,
    aten.__ior__.Scalar: aten.bitwise_or.Scalar,
    aten.__ixor__.Tensor: aten.bitwise_xor.Tensor,
    aten.__ixor__.Scalar: aten.bitwise_xor.Scalar,
    aten.normal_.default: aten.normal_functional.default,
    aten.detach_.default: aten.detach.default,
}
"""In-place ops whose functional op is not named like them."""

RANDOM = {
    aten.normal_,
    aten.uniform_,
    aten.bernoulli_,
    aten.exponential_,
    aten.cauchy_,
    aten.log_normal_,
    aten.geometric_,
    aten.random_,
}


def written_operand(node: fx.Node) -> fx.Node | None:
    """The operand a call writes to, if any: its first, or `out=`.

    Raises:
        CaptureError: It writes to something else.
    """
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    if not op(node)._schema.is_mutable:
        return None
    writes = [argument.name for argument in op(node)._schema.arguments if _is_written(argument)]
    written: Any = None
    if writes == ["out"]:
        written = node.kwargs["out"]
    elif writes == [op(node)._schema.arguments[0].name]:
        written = arguments(node)[0]
    if not isinstance(written, fx.Node):
        raise _write_error(node)
    return written


def functional_value(r: Rewriter, node: fx.Node) -> fx.Node:
    """The new value of what the in-place call `node` writes, of the same dtype and shape."""
    if "out" in node.kwargs:
        kwargs: dict[str, Any] = dict(node.kwargs)
        out = kwargs.pop("out")
        return _fitted(r, r(_op_without_out(node), *arguments(node), **kwargs), out)
    x = arguments(node)[0]
    old: Tensor = x.meta["val"]
    if node.target is aten.copy_.default:
        return _fitted(r, arguments(node)[1], x)
    if node.target is aten.zero_.default:
        return r(aten.zeros_like.default, x)
    args = arguments(node)
    if op(node).overloadpacket in RANDOM:
        # the new values owe nothing to the old ones, and most of these have no derivative
        args = (r(aten.detach.default, x), *args[1:])
    if node.target is aten.bernoulli_.float:
        return r(aten.bernoulli.p, args[0], *(args[1:] or (0.5,)), **node.kwargs)
    if node.target is aten.fill_.Scalar:
        return r(aten.full_like.default, x, arguments(node)[1])
    if node.target is aten.fill_.Tensor:
        return _fitted(r, arguments(node)[1], x)
    target = FUNCTIONAL.get(node.target) or _functional_op(node)
    new = r(target, *args, **node.kwargs)
    return r(aten.to.dtype, new, old.dtype) if new.meta["val"].dtype != old.dtype else new


def _functional_op(node: fx.Node) -> Any:
    """`add_.Tensor` -> `add.Tensor`."""
    namespace, _, name = op(node)._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    target = getattr(packet, op(node)._overloadname, None)
    if not name.endswith("_") or target is None or target._schema.is_mutable:
        raise _write_error(node)
    if target._schema.returns[0].alias_info is not None:
        # transpose_, squeeze_, detach_: these change the tensor object, not its values
        raise _write_error(node)
    return target


def _op_without_out(node: fx.Node) -> Any:
    """`div.out` -> `div.Tensor`: the overload that takes all but `out`."""
    schema = op(node)._schema
    namespace, _, name = schema.name.partition("::")
    wanted = [(a.name, str(a.type)) for a in schema.arguments if not _is_written(a)]
    packet = getattr(getattr(torch.ops, namespace), name)
    for overload in packet.overloads():
        other = getattr(packet, overload)._schema
        if not other.is_mutable and [(a.name, str(a.type)) for a in other.arguments] == wanted:
            return getattr(packet, overload)
    raise _write_error(node)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _fitted(r: Rewriter, source: fx.Node, x: fx.Node) -> fx.Node:
    """`source` with the dtype, device and shape of `x`."""
    old, new = x.meta["val"], source.meta["val"]
    if new.device != old.device:
        source = r(aten.to.device, source, old.device, old.dtype)
    elif new.dtype != old.dtype:
        source = r(aten.to.dtype, source, old.dtype)
    return r(aten.expand.default, source, r.sizes(x))


def new_running_stats(r: Rewriter, node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """(buffer, new value) of a batch norm in training, which then no longer writes them.

    torch.nn.BatchNorm: new = (1 - momentum) * old + momentum * batch's, with the unbiased variance.
    """
    x, weight, bias, mean, var, training, momentum, *rest = arguments(node)
    if not training or mean is None:
        return []
    node.args = (x, weight, bias, None, None, training, momentum, *rest)
    old: Tensor = x.meta["val"]
    x = r(aten.detach.default, x)
    if mean.meta["val"].dtype != old.dtype:
        x = r(aten.to.dtype, x, mean.meta["val"].dtype)
    dims = [dim for dim in range(old.ndim) if dim != 1]
    batch_mean = r(aten.mean.dim, x, dims)
    batch_var = r(aten.var.correction, x, dims, correction=1)
    return [
        (buffer, r(aten.add.Tensor, kept, r(aten.mul.Tensor, batch, momentum)))
        for buffer, batch in ((mean, batch_mean), (var, batch_var))
        for kept in (r(aten.mul.Tensor, buffer, 1 - momentum),)
    ]


def _write_error(node: fx.Node) -> CaptureError:
    return CaptureError(
        f"cannot capture the in-place op {node.target}.",
        f"{node.meta.get('where') or node.name} calls it.",
        "use the op that returns a new tensor.",
    )
