"""Rewrites of ops that multiply: a bias, a scale or a dropout becomes an op of its own."""

import math
from typing import Any

import torch
from torch import fx

from .program_edit import arguments
from .rewrites import Rewriter, argument, rewrite

aten = torch.ops.aten


@rewrite(aten.linear.default)
def linear(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """The bias added after: split over the contracted dim, it must be added once."""
    bias = argument(node, 2, "bias")
    if bias is None:
        return None
    return r(aten.add.Tensor, r(aten.linear.default, *arguments(node)[:2]), bias)


@rewrite(aten.addmm.default)
def addmm(r: Rewriter, node: fx.Node) -> fx.Node:
    """Matrix product, scaled by alpha, plus input scaled by beta."""
    return _scaled_sum(r, node, aten.mm.default)


@rewrite(aten.baddbmm.default)
def baddbmm(r: Rewriter, node: fx.Node) -> fx.Node:
    """Batched matrix product, scaled by alpha, plus input scaled by beta."""
    return _scaled_sum(r, node, aten.bmm.default)


@rewrite(aten.addmv.default)
def addmv(r: Rewriter, node: fx.Node) -> fx.Node:
    """Matrix by vector, scaled by alpha, plus input scaled by beta."""
    return _scaled_sum(r, node, aten.mv.default)


def _scaled_sum(r: Rewriter, node: fx.Node, product: Any) -> fx.Node:
    added, a, b = arguments(node)[:3]
    alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
    out = r(product, a, b)
    if alpha != 1:
        out = r(aten.mul.Tensor, out, alpha)
    if beta == 0:
        # the input is not read then: NaN in it must not spread
        return out
    if beta != 1:
        added = r(aten.mul.Tensor, added, beta)
    return r(aten.add.Tensor, out, added)


@rewrite(
    aten.conv1d.default,
    aten.conv1d.padding,
    aten.conv2d.default,
    aten.conv2d.padding,
    aten.conv3d.default,
    aten.conv3d.padding,
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
)
def conv(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """The bias added after, as for linear."""
    bias = argument(node, 2, "bias")
    if bias is None:
        return None
    kwargs = {k: v for k, v in node.kwargs.items() if k != "bias"}
    out = r(node.target, *arguments(node)[:2], None, *arguments(node)[3:], **kwargs)
    spatial = arguments(node)[1].meta["val"].ndim - 2
    channels = bias.meta["val"].shape[0]
    return r(aten.add.Tensor, out, r(aten.reshape.default, bias, [channels, *[1] * spatial]))


@rewrite(aten.scaled_dot_product_attention.default)
def attention(r: Rewriter, node: fx.Node) -> fx.Node | None:
    """Attention with dropout as matmul, softmax, dropout, matmul, as torch's math path does it."""
    dropout = argument(node, 4, "dropout_p", 0.0)
    if dropout == 0:
        return None
    q, k, v = arguments(node)[:3]
    mask = argument(node, 3, "attn_mask")
    if node.kwargs.get("enable_gqa", False):
        repeats = q.meta["val"].shape[-3] // k.meta["val"].shape[-3]
        k = r(aten.repeat_interleave.self_int, k, repeats, -3)
        v = r(aten.repeat_interleave.self_int, v, repeats, -3)
    scale: Any = node.kwargs.get("scale")
    root = math.sqrt(1 / math.sqrt(q.meta["val"].shape[-1]) if scale is None else abs(scale))
    # both are scaled by the root, so that the product does not overflow in half precision
    q = r(aten.mul.Tensor, q, math.copysign(root, 1 if scale is None else scale))
    k = r(aten.mul.Tensor, k, root)
    scores = r(aten.matmul.default, q, r(aten.transpose.int, k, -2, -1))
    weights = _masked_softmax(r, node, scores, mask)
    weights = r(aten.dropout.default, weights, dropout, True)
    return r(aten.matmul.default, weights, v)


def _masked_softmax(r: Rewriter, node: fx.Node, scores: fx.Node, mask: Any) -> fx.Node:
    if argument(node, 5, "is_causal", False):
        q, k = arguments(node)[:2]
        ones = r(
            aten.ones.default,
            [r.size(q, -2), r.size(k, -2)],
            dtype=torch.bool,
            device=q.meta["val"].device,
        )
        allowed = r(aten.tril.default, ones)
        hidden = r(aten.bitwise_not.default, allowed)
        return _softmax(r, r(aten.masked_fill.Scalar, scores, hidden, -math.inf))
    if mask is None:
        return _softmax(r, scores)
    if mask.meta["val"].dtype == torch.bool:
        scores = r(aten.masked_fill.Scalar, scores, r(aten.bitwise_not.default, mask), -math.inf)
    else:
        scores = r(aten.add.Tensor, scores, mask)
    # a query that may see nothing gets zeros, not NaN
    blind = r(aten.all.dim, r(aten.eq.Scalar, scores, -math.inf), -1, True)
    weights = _softmax(r, r(aten.masked_fill.Scalar, scores, blind, 0.0))
    return r(aten.masked_fill.Scalar, weights, blind, 0.0)


def _softmax(r: Rewriter, scores: fx.Node) -> fx.Node:
    return r(aten.softmax.int, scores, -1)
