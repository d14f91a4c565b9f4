"""Whether an op's output lies in its operand's memory, read off shapes and strides."""

from math import prod

import torch
from torch import Tensor, fx

from tpcompile.cost import hint
from tpcompile.program import values

_RESHAPES = ("aten.reshape", "aten.flatten", "aten._reshape", "aten.view", "aten.unflatten")


def describes_anew(node: fx.Node) -> bool:
    """Whether a call is a view, or a copy where no view will do, such as `reshape`."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def lies_in_operand(node: fx.Node, source: fx.Node) -> bool:
    """Whether a call's outputs lie in its first operand's memory."""
    name = str(node.target)
    if name.startswith("aten.dropout"):
        return not node.args[2] or bool(node.args[1] == 0)
    if not describes_anew(node):
        return False
    old, new = source.meta["val"], values(node)[0]
    if old.dtype != new.dtype:
        return False
    if name.startswith("aten.contiguous"):
        return _strides(old) == _strides(_contiguous_like(old))
    if name.startswith(_RESHAPES):
        return _viewable(old, tuple(map(hint, new.shape)))
    return True


def _strides(val: Tensor) -> tuple[int, ...]:
    return tuple(hint(s) for n, s in zip(val.shape, val.stride(), strict=True) if hint(n) != 1)


def _contiguous_like(val: Tensor) -> Tensor:
    return torch.empty(tuple(map(hint, val.shape)), device="meta")


def _viewable(val: Tensor, shape: tuple[int, ...]) -> bool:
    flat = torch.empty_strided(
        tuple(map(hint, val.shape)), tuple(map(hint, val.stride())), device="meta"
    )
    try:
        flat.view(shape)
    except RuntimeError:
        return False
    return True


def folds(val: Tensor) -> bool:
    """Whether a matmul can read all but the last two dims of an operand as one, without a copy."""
    shape = tuple(map(hint, val.shape))
    return val.ndim < 3 or _viewable(val, (prod(shape[:-2]), *shape[-2:]))
