"""Tensors made from sizes: each rank makes its own part."""

from functools import partial
from typing import Any

from torch import randn

from tpcompile.ops.equations import aten, names_in, spec_for
from tpcompile.rule import Call, Local, Rule, Spec, Split, rule


def _with_local_size(op: Any, out: Spec, position: int) -> Local:
    """The same call, its size argument (number `position`) local."""

    def local(split: Split, *args: Any, **kwargs: Any) -> Call:
        size = [split.length(dim) for dim in out]
        return op, (*args[:position], size, *args[position + 1 :]), kwargs

    return local


def from_size(op: Any, *args: Any, **kwargs: Any) -> Rule:
    """Size [*n] -> [*n]."""
    out = spec_for(args[0], "n")
    return Rule((), (out,), local=_with_local_size(op, out, 0))


def from_tensor_and_size(op: Any, *args: Any, **kwargs: Any) -> Rule:
    """x: any, size [*n] -> [*n]. Only dtype and device of x are read."""
    unread, out = spec_for(args[0].shape, "x"), spec_for(args[1], "n")
    return Rule((unread,), (out,), names_in(unread), local=_with_local_size(op, out, 1))


for _op in aten("zeros ones empty.memory_format"):
    rule(_op, samples=[lambda: ([4, 6],), lambda: ([3],)])(partial(from_size, _op))
for _op in aten("full"):
    rule(_op, samples=[lambda: ([4, 6], 2.0), lambda: ([3, 1], 1)])(partial(from_size, _op))
for _op in aten("new_zeros new_ones new_empty"):
    rule(_op, samples=[lambda: (randn(2, 3), [4, 6])])(partial(from_tensor_and_size, _op))
for _op in aten("new_full"):
    rule(_op, samples=[lambda: (randn(2), [4, 6], 3.0)])(partial(from_tensor_and_size, _op))
