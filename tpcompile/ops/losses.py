"""Losses. A sum over tokens may be split; a mean's divisor is put right by the rewrite or whole."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

from torch import Tensor, ops, rand, randint, randn, tensor

from tpcompile import collectives
from tpcompile.ops.equations import Shaped, aten, broadcast, equation, names_in
from tpcompile.rule import Call, Local, Rule, Split, rule

NONE, MEAN, SUM = 0, 1, 2
"""Values of ATen's `reduction` argument."""


@rule(
    *aten("cross_entropy_loss"),
    samples=[
        lambda: (randn(6, 8), randint(0, 8, (6,))),
        lambda: (randn(6, 8), tensor([1, -100, 7, 0, -100, 3]), rand(8), MEAN),
        lambda: (randn(6, 8), randint(0, 8, (6,)), None, SUM, -100, 0.1),
        lambda: (randn(6, 7), randint(0, 7, (6,)), rand(7), NONE, 2, 0.2),
        lambda: (randn(2, 8, 3), randint(0, 8, (2, 3)), None, NONE),
        lambda: (randn(8), tensor(3)),
        lambda: (randn(6, 8), rand(6, 8)),
    ],
)
def cross_entropy_loss(
    logits: Shaped,
    target: Shaped,
    weight: Shaped | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Rule:
    """logits: [n, v, *d], target: [n, *d] -> [n, *d] or []. Split v: each rank its own logits."""

    def local(split: Split, logits: Any, target: Any, *rest: Any, **kwargs: Any) -> Call:
        if not split.is_split("v"):
            return ops.aten.cross_entropy_loss.default, (logits, target, *rest), kwargs
        class_weight = rest[0] if rest else kwargs.get("weight")
        options = (reduction, ignore_index, label_smoothing)
        place = (split.axis, split.offset("v"), split.global_size("v"))
        return collectives.vocab_cross_entropy, (logits, target, class_weight, *options, *place), {}

    is_soft = target.dtype.is_floating_point
    return _of_classes(
        *(logits, target, weight, reduction),
        # The rewrite looks classes up by index.
        whole="v" if is_soft else "",
        plain="v",
        inner="v",
        local=local,
    )


@rule(
    *aten("nll_loss_nd nll_loss"),
    samples=[
        lambda: (randn(6, 8), randint(0, 8, (6,))),
        lambda: (randn(6, 8), randint(0, 8, (6,)), rand(8), SUM),
        lambda: (randn(6, 8), randint(0, 8, (6,)), None, NONE),
    ],
)
def nll_loss(
    scores: Shaped,
    target: Shaped,
    weight: Shaped | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
) -> Rule:
    """scores: [n, v, *d], target: [n, *d] -> [n, *d] or []. v whole."""
    return _of_classes(scores, target, weight, reduction, whole="v")


def _of_classes(
    scores: Shaped, target: Shaped, weight: Shaped | None, reduction: int, whole: str, **fields: Any
) -> Rule:
    batch = "" if scores.ndim == 1 else "n "
    classes = f"{batch}v *d" if scores.ndim > 2 else f"{batch}v"
    indices = (f"{batch}*d" if scores.ndim > 2 else batch) or "."
    targets = classes if target.dtype.is_floating_point else indices
    weights = [] if weight is None else [weight]
    text = f"{classes}, {targets}{', v' * len(weights)} -> {indices if reduction == NONE else '.'}"
    if reduction == MEAN:
        # Its divisor counts the tokens that are not ignored, on all ranks.
        whole += " n *d"
    return equation(text, scores, target, *weights, whole=whole, **fields)


def _each(
    operands: tuple[Any, ...], reduction: int, local: Callable[[list[str]], Local]
) -> Rule | None:
    """The rule of a loss on each element of (x, target, weights), then reduced over all of them.

    None where x and target are broadcast: ATen's own gradient is wrong then.
    """
    tensors = [t for t in operands if t is not None]
    if tuple(tensors[0].shape) != tuple(tensors[1].shape):
        return None
    ins, out = broadcast([t.shape for t in tensors])
    if reduction == NONE:
        return Rule(tuple(ins), (out,))
    if reduction == SUM:
        return Rule(tuple(ins), ((),))
    return Rule(tuple(ins), ((),), local=local(sorted(names_in(out))))


def share_of_mean_loss(name: str, counts: list[int], *args: Any, **kwargs: Any) -> Tensor:
    """This rank's part of a mean loss over `prod(counts)` elements; the op is told to sum."""
    return getattr(ops.aten, name).default(*args, **kwargs) / prod(counts)


def _mean_share(name: str, position: int, factors: list[str]) -> Local:
    """The rewrite of a mean loss whose `reduction` is argument number `position`."""

    def local(split: Split, *args: Any, **kwargs: Any) -> Call:
        counts = [split.global_size(factor) for factor in factors]
        absent = [None] * (position - len(args))
        given = (*args[:position], *absent, SUM, *args[position + 1 :])
        kwargs.pop("reduction", None)
        return share_of_mean_loss, (name, counts, *given), kwargs

    return local


def _samples(*options: Any, **named: Any) -> list[Callable[[], tuple[Any, ...]]]:
    """One sample for each reduction."""
    end = (named,) if named else ()
    return [
        lambda r=r: (rand(4, 6) * 0.8 + 0.1, rand(4, 6) * 0.8 + 0.1, r, *options, *end)
        for r in (NONE, MEAN, SUM)
    ]


def elementwise_loss(
    name: str, x: Shaped, target: Shaped, reduction: int = MEAN, *args: Any, **kwargs: Any
) -> Rule | None:
    """x, target: [*b] -> [*b] or []. A split mean: each rank's sum over the global count."""
    return _each((x, target), reduction, partial(_mean_share, name, 2))


for _name in ("mse_loss", "l1_loss", "soft_margin_loss", "kl_div"):
    rule(*aten(_name), samples=_samples())(partial(elementwise_loss, _name))
for _name in ("smooth_l1_loss", "huber_loss"):
    rule(*aten(_name), samples=_samples(0.5))(partial(elementwise_loss, _name))


@rule(
    *aten("binary_cross_entropy"),
    samples=[
        lambda: (rand(4, 6) * 0.8 + 0.1, rand(4, 6)),
        lambda: (rand(4, 6) * 0.8 + 0.1, rand(4, 6), rand(6), SUM),
    ],
)
def binary_cross_entropy(
    x: Shaped, target: Shaped, weight: Shaped | None = None, reduction: int = MEAN
) -> Rule | None:
    """x, target, weight: [*b] -> [*b] or []."""
    return _each((x, target, weight), reduction, partial(_mean_share, "binary_cross_entropy", 3))


@rule(
    *aten("binary_cross_entropy_with_logits"),
    samples=[
        lambda: (randn(4, 6), rand(4, 6)),
        lambda: (randn(4, 6), rand(4, 6), rand(6), rand(6), SUM),
        lambda: (randn(4, 6), rand(4, 6), None, rand(6), NONE),
    ],
)
def binary_cross_entropy_with_logits(
    x: Shaped,
    target: Shaped,
    weight: Shaped | None = None,
    pos_weight: Shaped | None = None,
    reduction: int = MEAN,
) -> Rule | None:
    """x, target, weight, pos_weight: [*b] -> [*b] or []."""
    local = partial(_mean_share, "binary_cross_entropy_with_logits", 4)
    return _each((x, target, weight, pos_weight), reduction, local)
