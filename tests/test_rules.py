"""Every rule is proved by execution; wrong rules are caught; no op of the models is forgotten."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers.integrations.moe  # registers transformers.grouped_mm_fallback
from torch import ops, rand, randint, randn, tensor

import tpcompile
import tpcompile.ops
from tpcompile import rule as rules
from tpcompile.check_rule import check_rule
from tpcompile.errors import InputError, RuleError
from tpcompile.ops import REPLICATED
from tpcompile.rule import RULES, Rule, rule_for

assert tpcompile.ops
assert transformers.integrations.moe

SEEN = """
linear.default add.Tensor view.default transpose.int mul.Tensor reshape.default
_assert_tensor_metadata.default slice.Tensor unsqueeze.default to.dtype embedding.default
cross_entropy_loss.default arange.default scaled_dot_product_attention.default sub.Tensor
cat.default cos.default sin.default mean.dim div.Tensor rsqrt.default flatten.using_ints pow.Scalar
reciprocal.default arange.start_step square.default silu.default gelu.default layer_norm.default
expand.default to.dtype_layout softmax.int index.Tensor contiguous.default le.Tensor __and__.Tensor
cumsum.default new_ones.default pad.default ne.Scalar alias.default to.device eq.Tensor
dropout.default neg.default matmul.default diff.default pow.Tensor_Scalar
repeat_interleave.self_int select.int chunk.default sum.dim_IntList zeros.default permute.default
tanh.default topk.default add_.Tensor zeros_like.default squeeze.dim where.ScalarOther
sigmoid.default masked_fill.Scalar relu.default copy_.default clamp.default ge.Scalar
split_with_sizes.default ones.default einsum.default bmm.default index_put_.default
lift_fresh_copy.default gt.Scalar eq.Scalar gt.Tensor div_.Tensor sort.default floor_divide.default
histc.default empty_like.default gather.default new_zeros.default clone.default masked_fill_.Scalar
unbind.int exp.default tril.default triu.default mean.default split.Tensor bitwise_not.default
numpy_T.default stack.default lt.Scalar abs.default fill_.Tensor conv1d.default conv2d.default
argmax.default linalg_vector_norm.default type_as.default sum.default full.default arange.start
baddbmm.default softplus.default detach.default repeat.default mul_.Tensor log_softmax.int
clamp_min.default expand_as.default amax.default one_hot.default new_empty.default
pow.Tensor_Tensor max.dim log.default full_like.default min.other where.self t.default glu.default
group_norm.default binary_cross_entropy_with_logits.default broadcast_tensors.default
mse_loss.default unflatten.int batch_norm.default scatter.src scatter_add.default addmm.default
scatter_.value broadcast_to.default le.Scalar eye.default rms_norm.default roll.default
tensordot.default _weight_norm.default std.dim logsumexp.default nll_loss_nd.default
kl_div.default var.dim log1p.default swapaxes.default movedim.int mT.default narrow.default
unfold.default flip.default relu_.default neg_.default masked_scatter.default index_copy_.default
maximum.default sign.default ones_like.default argsort.stable where.default sym_size.int
_assert_scalar.default index_add_.default index_add.default max_pool2d.default
adaptive_avg_pool2d.default rsub.Scalar lstm.input fft_fft.default real.default
view_as_complex.default view_as_real.default
"""
"""ATen ops in the captured graphs of a collection of Hugging Face and hand-written models."""

MAY_STAY_WHOLE = {
    *("max.default", "min.default", "prod.default", "any.default", "all.default"),
    *("std.default", "var.default", "median.default", "norm.Scalar"),
}
"""Ops that reduce everything, not by a sum."""

aten = ops.aten


def overload(key: Any) -> Any:
    """The op that a key of RULES stands for."""
    if not isinstance(key, str):
        return key
    space, packet, name = key.split(".")
    return getattr(getattr(getattr(ops, space), packet), name)


def drawn(sample: Callable[[], Sequence[Any]]) -> tuple[list[Any], dict[str, Any]]:
    """(args, kwargs) of a sample."""
    torch.manual_seed(0)
    args = list(sample())
    return args, args.pop() if args and isinstance(args[-1], dict) else {}


@pytest.mark.parametrize("key", list(RULES), ids=str)
def test_rule_is_proved_by_execution(key: Any) -> None:
    """Split, run, rejoin: outputs, gradients and linearity are as every sample's rule says."""
    op = overload(key)
    # This op takes no float64.
    dtype = torch.float32 if op is aten._grouped_mm.default else torch.float64
    splits = check_rule(op, dtype=dtype)
    assert splits or str(op).removeprefix("aten.") in MAY_STAY_WHOLE


@pytest.mark.parametrize("name", SEEN.split())
def test_no_op_is_forgotten(name: str) -> None:
    """Every op seen in a model has a rule, or a reason to have none."""
    packet, _, overload_name = name.partition(".")
    op = getattr(getattr(aten, packet), overload_name)
    assert (op in RULES) != (op in REPLICATED)


EDGES = [
    (aten.view.default, (randn(1, 1), [1])),
    (aten.view.default, (randn(1), [])),
    (aten.view.default, (randn(2, 3, 4, 5), [6, 20])),
    (aten.view.default, (randn(12), [2, 2, 3])),
    (aten.view.default, (randn(10, 6), [15, 4])),
    (aten.slice.Tensor, (randn(4, 12), 1, 5, 5)),
    (aten.slice.Tensor, (randn(4, 12), 1, 12, 20)),
    (aten.cat.default, ([torch.zeros(0), torch.zeros(0)],)),
    (aten.cat.default, ([randn(1, 4), randn(1, 4)],)),
    (aten.index.Tensor, (randn(4, 5, 6), [None, tensor([0, 1]), tensor([[1], [2]])])),
    (aten.index.Tensor, (randn(4, 5), [tensor(1), tensor(2)])),
    (aten.index_put.default, (randn(4, 5, 6), [tensor([0, 1])], randn(2, 1, 6))),
    (aten.expand.default, (tensor(1.0), [2, 3])),
    (aten.repeat.default, (randn(3), [2, 2])),
    (aten.mean.dim, (tensor(1.0), [0])),
    (aten.softmax.int, (tensor(1.0), 0)),
    (aten.add.Tensor, (tensor(1), tensor(1.0))),
    (aten.linear.default, (randn(1, 1), randn(1, 1))),
    (aten.linear.default, (randn(2, 1), randn(4, 1), randn(4))),
    (aten.matmul.default, (randn(1, 3, 1, 4), randn(2, 1, 4, 5))),
    (aten.addmm.default, (randn(4, 1), randn(4, 6), randn(6, 8))),
    (aten.scaled_dot_product_attention.default, (randn(2, 4, 1, 8), *[randn(2, 4, 5, 8)] * 2)),
    (aten.cross_entropy_loss.default, (randn(1, 8), tensor([3]))),
    (aten.cross_entropy_loss.default, (randn(2, 8, 3), randint(0, 8, (2, 3)), rand(8), 2, 2, 0.1)),
    (aten.group_norm.default, (randn(2, 4), 4)),
    (aten.embedding.default, (randn(1, 4), tensor([0, 0]))),
    (aten.embedding.default, (randn(6, 4), tensor(3))),
    (aten.dropout.default, (randn(8, 6).t(), 0.3, True)),
    (aten.chunk.default, (randn(4, 5), 3, 1)),
    (aten.index_select.default, (randn(3, 4), 1, tensor(1))),
    (aten.squeeze.default, (randn(2, 1, 3),)),
]


@pytest.mark.parametrize(("op", "args"), EDGES, ids=[str(op) for op, _ in EDGES])
def test_rule_holds_at_the_edges(op: Any, args: tuple[Any, ...]) -> None:
    """Dims of size 1 or 0, tensors without dims, broadcast batches."""
    check_rule(op, args)


UNSAID = [
    (aten.scaled_dot_product_attention.default, (*[randn(2, 4, 3)] * 3, None, 0.1)),
    (aten.einsum.default, ("ii->i", [randn(4, 4)])),
    (aten.index.Tensor, (randn(4), [tensor([True, False, True, True])])),
    (aten.one_hot.default, (tensor([0, 1]),)),
    (aten.mse_loss.default, (randn(3, 4), randn(4))),
    (aten.batch_norm.default, (randn(4, 6), *[None] * 4, True, 0.1, 1e-5, False)),
]


@pytest.mark.parametrize(("op", "args"), UNSAID, ids=[str(op) for op, _ in UNSAID])
def test_rule_says_nothing(op: Any, args: tuple[Any, ...]) -> None:
    """Calls that no equation describes are replicated."""
    assert rule_for(op, args, {}) is None


EQUATIONS = [
    (aten.linear.default, (randn(2, 6, 8), randn(4, 8)), "b0 b1 k, n k -> b0 b1 n"),
    (aten.view.default, (randn(2, 6, 12), [2, 6, 3, 4]), "f4 f3 (f2 f1) -> f4 f3 f2 f1"),
    (aten.slice.Tensor, (randn(4, 12), 1, 2, 8), "i0 (before + m + after) -> i0 m"),
    (
        aten.split_with_sizes.default,
        (randn(4, 12), [8, 2, 2], 1),
        "i0 (p0 + p1 + p2) -> i0 p0, i0 p1, i0 p2",
    ),
    (
        aten.scaled_dot_product_attention.default,
        (randn(2, 4, 6, 8), *[randn(2, 2, 6, 8)] * 2, None, 0.0, True, {"enable_gqa": True}),
        "b0 (h r) s d, b0 h t d, b0 h t e -> b0 (h r) s e  whole: d e s t",
    ),
    (aten.embedding.default, (randn(6, 4), tensor([[1, 2]] * 2)), "v h, b0 b1 -> b0 b1 h"),
    (
        aten.cross_entropy_loss.default,
        (randn(6, 8), randint(0, 8, (6,))),
        "n v, n -> .  whole: n",
    ),
]


@pytest.mark.parametrize(("op", "args", "text"), EQUATIONS, ids=[str(op) for op, *_ in EQUATIONS])
def test_rule_reads_as_an_equation(op: Any, args: Sequence[Any], text: str) -> None:
    """What `str(rule)` prints for the ops that matter most."""
    positional, kwargs = drawn(lambda: args)
    assert str(rule_for(op, positional, kwargs)) == text


WRONG = {
    "softmax dim not whole": (aten.softmax.int, (randn(4, 6), -1), {"whole": frozenset()}),
    "norm dim not whole": (aten.layer_norm.default, (randn(4, 6), [6]), {"whole": frozenset()}),
    "keys not whole": (
        aten.scaled_dot_product_attention.default,
        (randn(4, 6, 3), randn(4, 6, 3), randn(4, 6, 3)),
        {"whole": frozenset("de")},
    ),
    "divisor of a mean": (aten.mean.dim, (randn(4, 6), [1]), {"local": None}),
    "literal shape": (aten.view.default, (randn(4, 6), [4, 2, 3]), {"local": None}),
    "not linear": (aten.relu.default, (randn(4, 6),), {"linear": ((0,),)}),
    "linear in one operand only": (
        aten.add.Tensor,
        (randn(4, 6), randn(4, 6)),
        {"linear": ((0,),)},
    ),
    "dims exchanged": (
        aten.mm.default,
        (randn(6, 6), randn(6, 6)),
        {"ins": Rule.parse("k m, k n -> m n").ins},
    ),
    "operand missing": (aten.mm.default, (randn(4, 6), randn(6, 2)), {"ins": ()}),
    "rank of an output": (aten.neg.default, (randn(4, 6),), {"outs": Rule.parse("-> i").outs}),
    "size of a sum": (
        aten.neg.default,
        (randn(4, 6),),
        {"ins": Rule.parse("i0 (a + b) -> .").ins, "sizes": {"a": 1, "b": 4}},
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_rule_is_caught(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way to be wrong raises."""
    op, args, change = WRONG[case]
    wrong = replace(rule_for(op, args, {}), **change)  # type: ignore[type-var]
    monkeypatch.setitem(rules.RULES, op, lambda *args, **kwargs: wrong)
    with pytest.raises(RuleError):
        check_rule(op, args)


def test_wrong_gradient_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rewrite whose output is right but whose gradient is not."""

    def local(split: Any, x: Any) -> Any:
        return lambda x: x.detach() * 2 - x, (x,), {}

    wrong = replace(rule_for(aten.alias.default, (randn(4),), {}), local=local)  # type: ignore
    monkeypatch.setitem(rules.RULES, aten.alias.default, lambda x: wrong)
    with pytest.raises(RuleError, match="gradient of operand 0"):
        check_rule(aten.alias.default, (randn(4),))


@pytest.mark.parametrize(
    ("op", "found", "fix"),
    [
        (aten.lstm.input, "no rule is registered for it", "register_rule(op, samples=[...])"),
        (aten.t.default, "it has no samples", "register_rule(op, samples=[...])"),
    ],
)
def test_nothing_to_check(op: Any, found: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No samples and no arguments."""
    monkeypatch.setitem(rules.SAMPLES, op, [])
    with pytest.raises(InputError) as caught:
        check_rule(op)
    assert str(caught.value) == f"check_rule({op})\n  {found}\n  fix: {fix}, or pass args="


class Relu(torch.nn.Module):
    """One op."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s] -> [b, s]."""
        return x.relu()


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        (lambda x: Rule.parse("b, b -> b"), "b, b -> b is for 2 tensors, not 1"),
        (lambda x: Rule.parse("b (s -> b"), "ValueError: "),
    ],
)
def test_a_rule_that_fails_is_named(rule: Any, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's rule: what is wrong with it, and where it was used."""
    monkeypatch.setitem(rules.RULES, aten.relu.default, rule)
    with pytest.raises(RuleError) as caught:
        tpcompile.explain(Relu(), randn(2, 4), tp=2)
    assert caught.value.asked == "use the rule of aten.relu.default in the root"
    assert caught.value.found.startswith(found)


def test_error_names_op_and_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole text."""
    wrong = Rule.parse("b n -> b n")
    monkeypatch.setitem(rules.RULES, aten.t.default, lambda x: wrong)
    with pytest.raises(RuleError) as caught:
        check_rule(aten.t.default, (randn(4, 6),))
    assert str(caught.value) == (
        "the rule of aten.t.default on [4, 6] is wrong: dim b.\n"
        "  rule b n -> b n; its size is 4, its factors make 6\n"
        "  fix: make the factor whole, or correct the equation, `linear` or `local`."
    )
