"""Ops that are spelled as other ops: a table of functions, one an op."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from .program import Program
from .program_edit import arguments, call, op
from .torch_private import sym_expr

aten = torch.ops.aten

Rewrite = Callable[["Rewriter", fx.Node], "fx.Node | list[fx.Node] | None"]
REWRITES: dict[Any, Rewrite] = {}
"""Op -> function that makes what the call is replaced by: a node, a list for an op with several
outputs, or None to keep the call."""


class Rewriter:
    """Makes calls in place of one node."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.node: fx.Node
        self._sizes: dict[Any, fx.Node] = {}

    def at(self, node: fx.Node) -> Rewriter:
        """This rewriter, making calls before `node` at its place in the model."""
        self.node = node
        return self

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new call before the node, `target(*args, **kwargs)`."""
        return call(self.program, self.node, target, args, kwargs, self.node)

    def note_size(self, node: fx.Node) -> None:
        """Remember a node that is a size; nodes are met in order."""
        val = node.meta.get("val")
        if isinstance(val, torch.SymInt):
            self._sizes.setdefault(sym_expr(val), node)

    def size(self, x: fx.Node, dim: int) -> Any:
        """A size of `x` as an argument: an int, or a node where it is symbolic."""
        size = x.meta["val"].shape[dim]
        if not isinstance(size, torch.SymInt):
            return size
        expr = sym_expr(size)
        if expr.is_Integer:
            return int(expr)
        if expr not in self._sizes:
            self._sizes[expr] = self(aten.sym_size.int, *self._source(expr, x, dim))
        return self._sizes[expr]

    def _source(self, expr: Any, x: fx.Node, dim: int) -> tuple[fx.Node, int]:
        """Where to read a size: off an input if one has it, as a value may come to be split."""
        if expr in self.program.symbols:
            name, place = self.program.symbols[expr]
            return next(n for n in self.program.placeholders("input") if n.name == name), place
        return x, dim % x.meta["val"].ndim

    def sizes(self, x: fx.Node) -> list[Any]:
        """All sizes of `x` as arguments."""
        return [self.size(x, dim) for dim in range(x.meta["val"].ndim)]


def same_shape(a: Tensor, b: Tensor) -> bool:
    """Whether two shapes are equal for all values of their symbols."""
    return a.ndim == b.ndim and all(map(_same_size, a.shape, b.shape))


def _same_size(a: Any, b: Any) -> bool:
    return _plain(a) == _plain(b)


def _plain(size: Any) -> Any:
    return sym_expr(size) if isinstance(size, torch.SymInt) else size


def rewrite(*ops: Any) -> Callable[[Rewrite], Rewrite]:
    """Register the decorated function as the rewrite of each op."""

    def register(fn: Rewrite) -> Rewrite:
        REWRITES.update(dict.fromkeys(ops, fn))
        return fn

    return register


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """An argument given by position, by name, or not at all."""
    given = arguments(node)
    return given[index] if len(given) > index else node.kwargs.get(name, default)


def rename(**targets: Any) -> None:
    """Register ops that differ from another in nothing but their name."""
    for name, target in targets.items():
        packet, _, overload = name.rpartition("_overload_")
        old = getattr(getattr(aten, packet), overload)
        REWRITES[old] = lambda r, node, new=target: r(new, *arguments(node), **node.kwargs)


rename(
    __and___overload_Tensor=aten.bitwise_and.Tensor,
    __and___overload_Scalar=aten.bitwise_and.Scalar,
    __or___overload_Tensor=aten.bitwise_or.Tensor,
    __or___overload_Scalar=aten.bitwise_or.Scalar,
    __xor___overload_Tensor=aten.bitwise_xor.Tensor,
    __xor___overload_Scalar=aten.bitwise_xor.Scalar,
    view_overload_default=aten.reshape.default,
    _unsafe_view_overload_default=aten.reshape.default,
    unsafe_split_with_sizes_overload_default=aten.split_with_sizes.default,
    broadcast_to_overload_default=aten.expand.default,
)


# --- dims moved --------------------------------------------------------------------------------


@rewrite(
    aten.numpy_T.default,
    aten.mT.default,
    aten.t.default,
    aten.swapaxes.default,
    aten.swapdims.default,
    aten.movedim.int,
    aten.movedim.intlist,
    aten.moveaxis.int,
    aten.moveaxis.intlist,
)
def as_permute(r: Rewriter, node: fx.Node) -> fx.Node:
    """permute.default with every dim given."""
    x = arguments(node)[0]
    # The order is what the op does to a tensor whose sizes are all different.
    ndim = x.meta["val"].ndim
    probe = torch.empty(tuple(range(2, 2 + ndim)), device="meta")
    moved = op(node)(probe, *arguments(node)[1:], **node.kwargs)
    return r(aten.permute.default, x, [size - 2 for size in moved.shape])


# --- reshapes ----------------------------------------------------------------------------------


@rewrite(aten.flatten.using_ints)
def flatten(r: Rewriter, node: fx.Node) -> fx.Node:
    """One reshape, with the flattened dim as -1."""
    x = arguments(node)[0]
    ndim = x.meta["val"].ndim
    if ndim == 0:
        return r(aten.reshape.default, x, [1])
    first = argument(node, 1, "start_dim", 0) % ndim
    last = argument(node, 2, "end_dim", -1) % ndim
    if first == last:
        return x
    sizes = r.sizes(x)
    flat = math.prod(sizes[first : last + 1]) if _all_ints(sizes[first : last + 1]) else -1
    return r(aten.reshape.default, x, [*sizes[:first], flat, *sizes[last + 1 :]])


@rewrite(aten.unflatten.int)
def unflatten(r: Rewriter, node: fx.Node) -> fx.Node:
    """One reshape, with the other dims as they are."""
    x, dim, sizes = arguments(node)
    dim %= x.meta["val"].ndim
    if -1 in sizes and _all_ints([x.meta["val"].shape[dim]]):
        sizes = list(node.meta["val"].shape[dim : dim + len(sizes)])
    around = r.sizes(x)
    return r(aten.reshape.default, x, [*around[:dim], *sizes, *around[dim + 1 :]])


@rewrite(aten.view_as.default, aten.reshape_as.default)
def view_as(r: Rewriter, node: fx.Node) -> fx.Node:
    """One reshape, to the other's sizes."""
    x, other = arguments(node)
    return r(aten.reshape.default, x, r.sizes(other))


@rewrite(aten.expand_as.default)
def expand_as(r: Rewriter, node: fx.Node) -> fx.Node:
    """One expand, to the other's sizes."""
    x, other = arguments(node)
    return r(aten.expand.default, x, r.sizes(other))


@rewrite(aten.broadcast_tensors.default)
def broadcast_tensors(r: Rewriter, node: fx.Node) -> list[fx.Node]:
    """One expand each."""
    out = node.meta["val"][0]
    sizes = []
    for i, size in enumerate(out.shape):
        dim = i - len(out.shape)
        donor = next(
            x
            for x in arguments(node)[0]
            if x.meta["val"].ndim >= -dim and _same_size(x.meta["val"].shape[dim], size)
        )
        sizes.append(r.size(donor, dim))
    return [r(aten.expand.default, x, sizes) for x in arguments(node)[0]]


def _all_ints(sizes: Any) -> bool:
    return all(isinstance(size, int) for size in sizes)


# --- splits ------------------------------------------------------------------------------------


@rewrite(
    aten.chunk.default,
    aten.split.Tensor,
    aten.split.sizes,
    aten.unsafe_chunk.default,
    aten.unsafe_split.Tensor,
    aten.tensor_split.sections,
    aten.tensor_split.indices,
)
def as_split_with_sizes(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """split_with_sizes where the sizes are numbers."""
    dim = argument(node, 2, "dim", 0)
    sizes = [piece.shape[dim] for piece in node.meta["val"]]
    if not _all_ints(sizes):
        return None
    return r(aten.split_with_sizes.default, arguments(node)[0], sizes, dim)


@rewrite(aten.glu.default)
def glu(r: Rewriter, node: fx.Node) -> fx.Node:
    """The first half times the sigmoid of the second."""
    x, dim = arguments(node)[0], argument(node, 1, "dim", -1)
    half = x.meta["val"].shape[dim] // 2
    halves = r(aten.split_with_sizes.default, x, [half, half], dim)
    gate = r(aten.sigmoid.default, r(operator.getitem, halves, 1))
    return r(aten.mul.Tensor, r(operator.getitem, halves, 0), gate)


# --- what a tensor is read for without its values ----------------------------------------------


@rewrite(aten.sym_size.int)
def size_read(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """A number where the size is one: nothing need be whole for it."""
    x, dim = arguments(node)
    size = x.meta["val"].shape[dim]
    expr = sym_expr(size) if isinstance(size, torch.SymInt) else size
    if not isinstance(expr, int) and not expr.is_Integer:
        return None
    for user in list(node.users):
        user.args, user.kwargs = map_arg(
            (arguments(user), user.kwargs), lambda n: int(expr) if n is node else n
        )
    return x


@rewrite(aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default)
def new_filled(r: Rewriter, node: fx.Node) -> fx.Node:
    """zeros, ones or empty: of the tensor only dtype and device are read."""
    made: dict[Any, Any] = {
        aten.new_zeros.default: aten.zeros.default,
        aten.new_ones.default: aten.ones.default,
        aten.new_empty.default: aten.empty.memory_format,
    }
    new = node.meta["val"]
    return r(made[node.target], arguments(node)[1], dtype=new.dtype, device=new.device)


@rewrite(aten.new_full.default)
def new_full(r: Rewriter, node: fx.Node) -> fx.Node:
    """full: of the tensor only dtype and device are read."""
    new = node.meta["val"]
    return r(aten.full.default, *arguments(node)[1:3], dtype=new.dtype, device=new.device)


# --- casts -------------------------------------------------------------------------------------


@rewrite(aten.type_as.default, aten.to.dtype_layout, aten.to.device, aten.to.other)
def cast(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """to.dtype where the device stays."""
    x = arguments(node)[0]
    old, new = x.meta["val"], node.meta["val"]
    if old.device != new.device or node.kwargs.get("memory_format") is not None:
        return None
    return r(aten.to.dtype, x, new.dtype)
