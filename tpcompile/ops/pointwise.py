"""Ops that act on each element by itself, broadcasting their operands."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import rand, randint, randn, tensor

from tpcompile.ops.equations import Shaped, aten, broadcast, is_tensor, tensors_of
from tpcompile.rule import Rule, rule

Groups = tuple[tuple[int, ...], ...]


def pointwise(args: Sequence[Any], linear: Groups = (), **fields: Any) -> Rule:
    """The rule of an op on the elements of the tensors among `args`."""
    ins, out = broadcast([t.shape for t in tensors_of(args)])
    return Rule(tuple(ins), (out,), linear=linear, **fields)


def _small() -> tuple[Any, ...]:
    return (rand(4, 6) * 0.8 + 0.1,)


def _row() -> tuple[Any, ...]:
    return (rand(1, 3, 4) * 0.8 + 0.1,)


def _bits() -> tuple[Any, ...]:
    return (randint(0, 2, (4, 6)).bool(),)


NONLINEAR = """
    relu relu_ gelu gelu_ silu silu_ tanh tanh_ sigmoid sigmoid_ exp exp_ expm1 log log1p log2 log10
    sqrt sqrt_ rsqrt rsqrt_ reciprocal reciprocal_ sin sin_ cos cos_ tan asin acos atan sinh cosh
    asinh atanh erf erfc erfinv square square_ abs abs_ floor ceil round trunc frac sign
    isnan isinf isfinite logical_not softplus log_sigmoid mish elu selu celu relu6 hardswish
    hardsigmoid hardtanh leaky_relu leaky_relu_ hardshrink softshrink nan_to_num signbit
    hardtanh_ relu6_ hardswish_ hardsigmoid_ elu_ mish_
    digamma lgamma exp2 sinc logit special_expit special_log1p
"""
LINEAR = """
    neg neg_ negative positive zero_ clone contiguous alias detach lift_fresh_copy zeros_like
    real conj resolve_conj resolve_neg
"""


@rule(*aten(NONLINEAR), samples=[_small, _row])
@rule(*aten("bitwise_not bitwise_not_ logical_not_"), samples=[_bits])
@rule(
    *aten("ones_like empty_like"), samples=[_small, lambda: (*_small(), {"dtype": torch.float32})]
)
@rule(
    *aten("clamp clamp_"),
    samples=[lambda: (randn(4, 6), -0.5, 0.5), lambda: (randn(4, 6), None, 0.1)],
)
@rule(*aten("clamp_min clamp_min_ clamp_max"), samples=[lambda: (randn(4, 6), 0.1)])
@rule(*aten("full_like"), samples=[lambda: (randn(4, 6), 2.0)])
@rule(*aten("threshold"), samples=[lambda: (randn(4, 6), 0.1, 3.0)])
@rule(*aten("fill.Scalar fill_.Scalar"), samples=[lambda: (randn(4, 6), 3.0)])
@rule(
    *aten("pow.Tensor_Scalar pow_.Scalar float_power.Tensor_Scalar"),
    samples=[lambda: (rand(4, 6) + 0.1, 3), lambda: (rand(4, 6) + 0.1, -0.5)],
)
@rule(*aten("pow.Scalar"), samples=[lambda: (2.0, randn(4, 6))])
@rule(
    *aten("eq.Scalar ne.Scalar ge.Scalar gt.Scalar le.Scalar lt.Scalar"),
    samples=[lambda: (randint(0, 3, (4, 6)), 1), lambda: (randn(4, 6), 0.1)],
)
@rule(
    *aten("remainder.Scalar fmod.Scalar floor_divide.Scalar"),
    samples=[lambda: (randn(4, 6) * 5, 2), lambda: (randint(0, 9, (4, 6)), 2)],
)
@rule(
    *aten("bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar __and__.Scalar __or__.Scalar"),
    samples=[lambda: (randint(0, 9, (4, 6)), 3)],
)
@rule(
    *aten("bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar"),
    samples=[lambda: (randint(0, 9, (4, 6)), 1)],
)
def unary(*args: Any, **kwargs: Any) -> Rule:
    """x: [*b] -> [*b]. Not linear: a partial sum must be finished first."""
    return pointwise(args)


@rule(*aten(LINEAR), samples=[_small, _row])
def linear_unary(*args: Any, **kwargs: Any) -> Rule:
    """x: [*b] -> [*b]. Linear: a partial sum passes through."""
    return pointwise(args, linear=((0,),))


@rule(
    *aten("to.dtype"),
    samples=[lambda: (randn(4, 6), torch.float32), lambda: (randn(4, 6), torch.int64)],
)
@rule(
    *aten("to.dtype_layout _to_copy"),
    samples=[
        lambda: (randn(4, 6), {"dtype": torch.float32}),
        lambda: (randn(4, 6), {"device": "cpu"}),
    ],
)
@rule(*aten("to.device"), samples=[lambda: (randn(4, 6), "cpu", torch.float32)])
@rule(
    *aten("to.prim_Device"),
    samples=[
        lambda: (randn(4, 6), torch.device("cpu")),
        lambda: (randn(4, 6), torch.device("cpu"), torch.int64),
    ],
)
def convert(x: Shaped, *args: Any, **kwargs: Any) -> Rule:
    """x: [*b] -> [*b]. Linear unless it rounds to an integer or a truth value."""
    given = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)]
    dtype = given[0] if given else x.dtype
    return pointwise((x,), linear=((0,),) if _keeps_sums(x.dtype, dtype) else ())


@rule(
    *aten("type_as to.other"),
    samples=[lambda: (randn(4, 6), randn(4, 6)), lambda: (randn(4, 6), tensor(1.0))],
)
def convert_like(x: Shaped, other: Shaped, *args: Any, **kwargs: Any) -> Rule:
    """x: [*b], other: any -> [*b]. Only the dtype of `other` is read."""
    if tuple(x.shape) == tuple(other.shape):
        return pointwise((x, other))
    (spec,), out = broadcast([x.shape])
    (unread,), _ = broadcast([other.shape], "other")
    names = frozenset(name for dim in unread for term in dim for name in term)
    return Rule((spec, unread), (out,), whole=names)


def _keeps_sums(source: torch.dtype, target: torch.dtype) -> bool:
    if target.is_floating_point or target.is_complex:
        return True
    is_integer = not (source.is_floating_point or source.is_complex)
    return is_integer and torch.bool not in (source, target)


def _pair() -> tuple[Any, ...]:
    return (rand(4, 6) + 0.1, rand(4, 6) + 0.1)


def _pair_broadcast() -> tuple[Any, ...]:
    return (rand(2, 4, 6) + 0.1, rand(4, 1) + 0.1)


def _scalar() -> tuple[Any, ...]:
    return (rand(4, 6) + 0.1, 0.7)


def _integers() -> tuple[Any, ...]:
    return (randint(1, 9, (4, 6)), randint(1, 9, (6,)))


def _truths() -> tuple[Any, ...]:
    return (randint(0, 2, (4, 6)).bool(), randint(0, 2, (6,)).bool())


@rule(
    *aten("add.Tensor add_.Tensor sub.Tensor sub_.Tensor subtract.Tensor"),
    samples=[_pair, _pair_broadcast, _scalar, lambda: (*_pair(), {"alpha": 2})],
)
@rule(*aten("rsub.Tensor"), samples=[_pair, lambda: (*_pair(), {"alpha": 2})])
@rule(*aten("add.Scalar sub.Scalar rsub.Scalar"), samples=[_scalar])
@rule(*aten("lerp.Scalar lerp_.Scalar"), samples=[lambda: (*_pair(), 0.3)])
def add(x: Any, y: Any, *args: Any, **kwargs: Any) -> Rule:
    """x: [*b], y: [*b] -> [*b]. Linear in both together; adding a number is not linear."""
    both = is_tensor(x) and is_tensor(y)
    number = 1 if both else y if is_tensor(x) else x
    return pointwise((x, y), linear=((0, 1),) if both else ((0,),) if number == 0 else ())


@rule(
    *aten("mul.Tensor mul_.Tensor multiply.Tensor"),
    samples=[_pair, _pair_broadcast, _scalar, lambda: (rand(4, 6), tensor(2.0))],
)
@rule(*aten("mul.Scalar mul_.Scalar"), samples=[_scalar])
def mul(x: Any, y: Any, **kwargs: Any) -> Rule:
    """x: [*b], y: [*b] -> [*b]. Linear in each."""
    count = is_tensor(x) + is_tensor(y)
    return pointwise((x, y), linear=((0,), (1,)) if count == 2 else ((0,),))


@rule(
    *aten("div.Tensor div_.Tensor divide.Tensor true_divide.Tensor"),
    samples=[_pair, _pair_broadcast, _scalar],
)
@rule(*aten("div.Scalar div_.Scalar"), samples=[_scalar])
@rule(*aten("div.Tensor_mode"), samples=[lambda: (*_pair(), {"rounding_mode": "floor"})])
@rule(*aten("div.Scalar_mode"), samples=[lambda: (*_scalar(), {"rounding_mode": "trunc"})])
def div(x: Any, y: Any, rounding_mode: str | None = None) -> Rule:
    """x: [*b], y: [*b] -> [*b]. Linear in x, unless it rounds."""
    return pointwise((x, y), linear=((0,),) if is_tensor(x) and not rounding_mode else ())


@rule(
    *aten("maximum minimum max.other min.other fmax fmin atan2 pow.Tensor_Tensor"),
    *aten("remainder.Tensor fmod.Tensor floor_divide floor_divide_.Tensor hypot logaddexp"),
    *aten("eq.Tensor ne.Tensor ge.Tensor gt.Tensor le.Tensor lt.Tensor xlogy.Tensor"),
    samples=[_pair, _pair_broadcast],
)
@rule(*aten("clamp_min.Tensor clamp_max.Tensor"), samples=[_pair, _pair_broadcast])
@rule(
    *aten("bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor"),
    *aten("__and__.Tensor __or__.Tensor __xor__.Tensor __iand__.Tensor __ior__.Tensor"),
    samples=[_integers, _truths],
)
@rule(*aten("bitwise_left_shift.Tensor bitwise_right_shift.Tensor"), samples=[_integers])
@rule(*aten("logical_and logical_or logical_xor"), samples=[_truths])
@rule(*aten("isclose"), samples=[_pair])
@rule(*aten("clamp.Tensor"), samples=[lambda: (randn(4, 6), randn(6), randn(4, 1) + 1)])
@rule(
    *aten("lerp.Tensor"),
    samples=[lambda: (randn(4, 6), randn(4, 6), rand(6))],
)
def nary(*args: Any, **kwargs: Any) -> Rule:
    """x, y, ...: [*b] -> [*b]. Not linear."""
    return pointwise((*args, *kwargs.values()))


@rule(
    *aten("addcmul addcmul_"),
    samples=[
        lambda: (randn(4, 6), randn(4, 6), randn(6)),
        lambda: (randn(4, 6), randn(4, 6), randn(4, 6), {"value": 0.5}),
    ],
)
def addcmul(x: Any, a: Any, b: Any, value: float = 1) -> Rule:
    """X + value * a * b, all [*b]. Linear in x with either factor."""
    return pointwise((x, a, b), linear=((0, 1), (0, 2)))


@rule(
    *aten("addcdiv addcdiv_"),
    samples=[
        lambda: (randn(4, 6), randn(4, 6), rand(6) + 1),
        lambda: (randn(4, 6), randn(4, 6), rand(4, 6) + 1, {"value": 0.5}),
    ],
)
def addcdiv(x: Any, a: Any, b: Any, value: float = 1) -> Rule:
    """X + value * a / b, all [*b]. Linear in x and a together."""
    return pointwise((x, a, b), linear=((0, 1),))


@rule(
    *aten("where.self"),
    samples=[
        lambda: (randn(4, 6) > 0, randn(4, 6), randn(4, 6)),
        lambda: (randn(4, 1) > 0, randn(4, 6), tensor(0.0)),
    ],
)
@rule(*aten("where.ScalarOther"), samples=[lambda: (randn(4, 6) > 0, randn(4, 6), 0.0)])
@rule(*aten("where.ScalarSelf"), samples=[lambda: (randn(4, 6) > 0, -1.0, randn(4, 6))])
@rule(*aten("where.Scalar"), samples=[lambda: (randn(4, 6) > 0, -1.0, 0.0)])
def where(condition: Any, x: Any, y: Any) -> Rule:
    """condition, x, y: [*b] -> [*b]. Linear in x and y together; a number must be 0."""
    numbers = [v for v in (x, y) if not is_tensor(v)]
    count = 2 - len(numbers)
    linear = (tuple(range(1, 1 + count)),) if count and not any(numbers) else ()
    return pointwise((condition, x, y), linear=linear)


@rule(
    *aten("masked_fill.Scalar masked_fill_.Scalar"),
    samples=[
        lambda: (randn(2, 4, 6), randn(4, 6) > 0, 0.0),
        lambda: (randn(2, 4, 6), randn(1, 6) > 0, -1e9),
    ],
)
@rule(
    *aten("masked_fill.Tensor masked_fill_.Tensor"),
    samples=[lambda: (randn(4, 6), randn(4, 6) > 0, tensor(2.0))],
)
def masked_fill(x: Any, mask: Any, value: Any) -> Rule:
    """x, mask: [*b], value: [] -> [*b]. Linear in x with value, a number must be 0."""
    together = (0, 2) if is_tensor(value) else (0,)
    return pointwise(
        (x, mask, value), linear=(together,) if len(together) == 2 or not value else ()
    )


@rule(
    *aten("copy_ copy"),
    samples=[lambda: (randn(4, 6), randn(4, 6)), lambda: (randn(4, 6), randn(6))],
)
@rule(*aten("fill.Tensor fill_.Tensor"), samples=[lambda: (randn(4, 6), tensor(2.0))])
def copy(x: Any, source: Any, *args: Any) -> Rule:
    """x, source: [*b] -> [*b]. Linear in the source; x is only written."""
    return pointwise((x, source), linear=((1,), (0, 1)))
