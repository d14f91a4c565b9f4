"""Which values autograd keeps for the backward pass, by op, and how much of them one rank has."""

import operator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, fx

from tpcompile.aliasing import describes_anew, folds, lies_in_operand
from tpcompile.cost import hint
from tpcompile.dims import Dim, MaybeDim, contains
from tpcompile.layout import share
from tpcompile.placement import R, State
from tpcompile.program import Program, operands, values
from tpcompile.strategies import Facts

Key = tuple[fx.Node, int | str]
"""A value, or something that an op makes for its backward alone."""
_INPUT = """
    pow.Tensor_Scalar silu gelu log log1p log2 log10 sin cos tan asin acos atan sinh cosh asinh
    acosh erf erfc erfinv square abs softplus mish hardswish leaky_relu hardtanh relu6 celu selu
    softshrink hardshrink clamp clamp_min clamp_max threshold log_sigmoid logit digamma lgamma sinc
    special_log1p max_pool2d avg_pool2d group_norm instance_norm batch_norm layer_norm rms_norm
    std.dim var.dim std.correction var.correction glu"""
_OUTPUT = """
    relu sigmoid tanh exp exp2 expm1 sqrt rsqrt reciprocal softmax.int _softmax log_softmax.int
    _log_softmax special_expit elu cross_entropy_loss"""
_BOTH = """
    amax amin prod max min std var std.correction var.correction linalg_vector_norm norm.Scalar
    norm.ScalarOpt_dim logsumexp cumprod pow.Scalar"""
_PRODUCT = """
    linear mm bmm mv dot outer matmul addmm baddbmm einsum mul.Tensor mul.Scalar addcmul
    conv1d conv2d conv3d convolution"""
_INDEX = """
    embedding index.Tensor gather index_select index_put scatter.src scatter_add index_add
    take_along_dim where.self where.ScalarOther where.ScalarSelf masked_fill.Scalar
    masked_fill.Tensor nll_loss_nd nll_loss cross_entropy_loss"""
_NOTHING = """
    add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar rsub.Tensor neg mean mean.dim sum
    sum.dim_IntList cat stack clone contiguous to.dtype _to_copy type_as to.dtype_layout pad
    constant_pad_nd roll flip cumsum repeat repeat_interleave.self_int tril triu div.Scalar
    floor ceil round sign detach zeros_like ones_like new_zeros new_ones logical_not"""
_STATISTICS = ("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_KEEPS: list[tuple[frozenset[str], str]] = [
    (_names(_INPUT), "input"),
    (_names(_OUTPUT), "output"),
    (_names(_BOTH), "both"),
    (_names(_PRODUCT), "product"),
    (_names(_INDEX), "index"),
    (_names(_NOTHING), "nothing"),
]
_BY_NAME: dict[str, set[str]] = {}
for _group, _word in _KEEPS:
    for _name in _group:
        _BY_NAME.setdefault(_name, set()).add(_word)
"""Op -> what it keeps: PyTorch's tools/autograd/derivatives.yaml, op by op."""


@dataclass(frozen=True)
class Saved:
    """One tensor that lives until the backward pass."""

    by: fx.Node
    """The first op that keeps it."""
    dims: tuple[MaybeDim, ...]
    shape: tuple[int, ...]
    """Global, at the example's sizes."""
    itemsize: int
    state: State

    def local_bytes(self, size: int) -> int:
        """Bytes on the rank that has most."""
        lengths = list(self.shape)
        if isinstance(self.state, Dim):
            place = next(
                i for i, d in enumerate(self.dims) if d is not None and contains(d, self.state)
            )
            lengths[place] = _longest(self.dims[place], self.state, lengths[place], size)
        return prod(lengths) * self.itemsize


def _longest(dim: MaybeDim, atom: Dim, length: int, size: int) -> int:
    root = dim.root()  # type: ignore[union-attr]
    if root is atom:
        return share(length, size, 0)
    parts = root.factors or root.terms or []
    total = sum if root.terms else prod
    sizes = [p.root().size for p in parts]
    if total(sizes) != length:  # symbolic: its units divide evenly
        return -(-length // size)
    pairs = zip(parts, sizes, strict=True)
    return total([_longest(p, atom, n, size) if contains(p, atom) else n for p, n in pairs])


class Keeper:
    """Walks a planned program and finds every tensor that its backward pass needs, once each.

    `whole` walks the program as one device would run it, without conversions.
    """

    def __init__(self, program: Program, *, device: str = "cuda", whole: bool = False) -> None:
        self.program, self.device, self.whole = program, device, whole
        self.facts: Facts = program.extra["facts"]
        self.plan = program.extra["assignment"]
        self.storage: dict[Key, Key] = {}
        """Value -> the value whose memory it is a view of."""
        self.saved: dict[Key, Saved] = {}

    def run(self) -> dict[Key, Saved]:
        """All kept tensors, in the order in which they are first kept; parameters are not in it."""
        for node in self.program.calls():
            if node.target is operator.getitem:
                source, index = node.args[0], node.args[1]
                self.storage[node, 0] = self._root(source, index)  # type: ignore[arg-type]
                continue
            self._alias(node)
            if node in self.facts.trained and "conversion" not in node.meta:
                self._keep(node)
        return self.saved

    def _root(self, node: fx.Node, index: int = 0) -> Key:
        return self.storage.get((node, index), (node, index))

    def _alias(self, node: fx.Node) -> None:
        """Note where the outputs of a view live."""
        inputs = operands(node)
        if "conversion" in node.meta:
            if self.whole or node.meta["conversion"].step.function == "copy":
                self.storage[node, 0] = self._root(inputs[0])
        elif inputs and lies_in_operand(node, inputs[0]):
            for i in range(len(values(node))):
                self.storage[node, i] = self._root(inputs[0])

    def _keep(self, node: fx.Node) -> None:
        inputs = operands(node)
        name = str(node.target).removeprefix("aten.").removesuffix(".default")
        words = _BY_NAME.get(name, set())
        if name == "scaled_dot_product_attention":
            self._attention(node, inputs)
        elif name in ("dropout", "native_dropout"):
            self._dropout(node)
        elif (
            name == "embedding"
            and self._is_split(node)
            and not isinstance(self._state(node, 0), Dim)
        ):
            # A rank looks up its own rows, and zeroes the others.
            self._fresh(node, "index", inputs[1])
            self._fresh(node, "elsewhere", inputs[1], torch.bool)
            return
        elif name.startswith("div.Tensor"):
            self._division(node, inputs)
        elif self._is_split_loss(node):
            self._add(node, inputs[0], 0)
            self._add(node, inputs[1], 0)
            self._fresh(node, "rows", inputs[1], torch.float32, copies=3)
        elif not words and not describes_anew(node):
            for source in inputs:
                self._add(node, source, 0)
        if words & {"input", "both"} and inputs:
            self._add(node, inputs[0], 0)
        if words & {"output", "both"} and not self._is_split_loss(node):
            self._output(node, name, inputs)
        if "product" in words:
            self._product(node, name, inputs)
        if "index" in words:
            for source in inputs:
                if not source.meta["val"].is_floating_point():
                    self._add(node, source, 0)
        if name in _STATISTICS:
            self._statistics(node, name, inputs[0])

    def _trained(self, node: fx.Node) -> bool:
        what = node.meta.get("conversion")
        return node in self.facts.trained if what is None else what.value.trained

    def _product(self, node: fx.Node, name: str, inputs: list[fx.Node]) -> None:
        """A factor is kept where another one is trained."""
        factors = inputs[1:] if name in ("addmm", "baddbmm", "addcmul") else inputs[:2]
        if name == "einsum":
            factors = inputs
        for i, source in enumerate(factors):
            if any(self._trained(other) for j, other in enumerate(factors) if j != i):
                if name in ("linear", "matmul") and not folds(source.meta["val"]):
                    self._fresh(node, f"folded{i}", source)
                else:
                    self._add(node, source, 0)

    def _division(self, node: fx.Node, inputs: list[fx.Node]) -> None:
        if len(inputs) == 2:
            self._add(node, inputs[1], 0)
            if self._trained(inputs[1]):
                self._add(node, inputs[0], 0)

    def _dropout(self, node: fx.Node) -> None:
        p, train = node.args[1], node.args[2]
        if not train or p == 0:
            return
        # CPU kernels multiply by a mask of the input's dtype; the others keep one byte.
        split = self._is_split(node)
        dtype = node.meta["val"].dtype if self.device == "cpu" and not split else torch.bool
        self._fresh(node, "mask", node, dtype)

    def _attention(self, node: fx.Node, inputs: list[fx.Node]) -> None:
        for source in inputs:
            self._add(node, source, 0)
        self._add(node, node, 0)
        val = node.meta["val"]
        dims, shape = node.meta["dims"][0][:-1], tuple(map(hint, val.shape[:-1]))
        self.saved[node, "lse"] = Saved(node, dims, shape, 4, self._state(node, 0))

    def _output(self, node: fx.Node, name: str, inputs: list[fx.Node]) -> None:
        if name == "cross_entropy_loss":
            self._fresh(node, "log_softmax", inputs[0])
        else:
            self._add(node, node, 0)

    def _is_split(self, node: fx.Node) -> bool:
        strategy = self.plan.strategies.get(node)
        return not self.whole and strategy is not None and strategy.split is not None

    def _is_split_loss(self, node: fx.Node) -> bool:
        return node.target is torch.ops.aten.cross_entropy_loss.default and self._is_split(node)

    def _state(self, node: fx.Node, index: int) -> State:
        if self.whole:
            return R
        if "conversion" in node.meta:
            return node.meta["conversion"].need
        strategy = self.plan.strategies.get(node)
        if strategy is not None:
            return strategy.outs[index]
        return self.plan.parameters.get(node, R)

    def _add(self, by: fx.Node, source: fx.Node, index: int) -> None:
        """Keep a value: its memory, that is."""
        key = self._root(source, index)
        node = key[0]
        leaf = self.program.leaves.get(node.name) if node.op == "placeholder" else None
        if (leaf is not None and leaf.kind != "input") or key in self.saved:
            return
        assert isinstance(key[1], int)
        val = values(node)[key[1]]
        shape = tuple(map(hint, val.shape))
        dims = node.meta["dims"][key[1]]
        self.saved[key] = Saved(by, dims, shape, val.dtype.itemsize, self._state(node, key[1]))

    def _fresh(
        self,
        by: fx.Node,
        name: str,
        like: fx.Node,
        dtype: torch.dtype | None = None,
        copies: int = 1,
        drop: int = 0,
    ) -> None:
        """Keep something new of a value's shape, without its last `drop` dims."""
        val: Tensor = like.meta["val"]
        shape, dims = tuple(map(hint, val.shape)), like.meta["dims"][0]
        state = self._state(like, 0)
        if drop:
            shape, dims = shape[:-drop], dims[:-drop]
        if isinstance(state, Dim) and not any(d is not None and contains(d, state) for d in dims):
            state = R
        itemsize = (dtype or val.dtype).itemsize * copies
        self.saved[by, name] = Saved(by, dims, shape, itemsize, state)

    def _statistics(self, node: fx.Node, name: str, x: fx.Node) -> None:
        """A norm's reciprocal deviation, and its mean."""
        by_row = name in ("layer_norm", "rms_norm")
        drop = len(node.args[1]) if by_row else x.meta["val"].ndim - 1  # type: ignore[arg-type]
        own = x.meta["val"].dtype
        dtype = own if self.device == "cpu" else torch.promote_types(own, torch.float32)
        self._fresh(node, "statistics", x, dtype, 1 if name == "rms_norm" else 2, drop)


__all__ = ["Keeper", "Saved"]
