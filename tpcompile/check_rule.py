"""Proves a rule by execution: split, run on the pieces, rejoin, compare with the whole op."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from tpcompile.errors import InputError, RuleError
from tpcompile.layout import join, take
from tpcompile.local_group import LocalGroup
from tpcompile.op_call import OpCall, Result, cast, trained_call, weight_for
from tpcompile.ops.equations import aten
from tpcompile.rank_split import RankSplit, split_together
from tpcompile.rule import SAMPLES, Rule, Spec, rule_for, rule_function, spec_text

_NO_RULE = "no rule is registered for it"
UNDEFINED = frozenset(aten("empty.memory_format empty_like new_empty"))
"""Ops whose values mean nothing; only shapes are compared."""


def check_rule(
    op: Any,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float64,
) -> int:
    """Prove the rule of an op by execution; the number of (factors, degree) splits that were run.

    Of one call with `args` and `kwargs`, or of every sample that the rule was registered with:
    every factor that may be split is split 2 and 3 ways; outputs and gradients of the pieces,
    rejoined as the rule says, must be those of the op on the whole, in `dtype`. The op must be
    linear in each group of operands that the rule lists.

    Raises:
        RuleError: They are not; the message names op and factor.
        InputError: There is nothing to try: no `args`, and no samples.
    """
    if args is None:
        return sum(check_rule(op, *sample, dtype=dtype) for sample in _samples(op))
    call = OpCall(op, list(args), dict(kwargs or {}))
    rule = rule_for(op, call.args, call.kwargs)
    if rule is None:
        found = "its rule says nothing of such a call" if rule_function(op) else _NO_RULE
        raise InputError(f"check_rule({op})", found, "register_rule(op), or pass other args=")
    call = trained_call(call.with_tensors([cast(x, dtype) for x in call.tensors()]))
    whole = call.run()
    sizes = _sizes(call, rule, whole.outs)
    tried = set()
    for factor in sorted(rule.factors() - rule.whole):
        factors = split_together(rule, factor)
        if not factors:
            continue
        for degree in (2, 3):
            if all(sizes[name] >= degree for name in factors):
                tried.add((factors, degree))
    for factors, degree in sorted(tried, key=lambda t: (sorted(t[0]), t[1])):
        try:
            _check_split(call, rule, whole, sizes, factors, degree)
        except (RuntimeError, IndexError, ValueError, AssertionError) as error:
            what = _way(RankSplit(("", degree, 0), sizes, factors))
            raise _wrong(call, rule, what, str(error)) from error
    for group in rule.linear:
        _check_linear(call, rule, group)
    return len(tried)


def _samples(op: Any) -> list[tuple[list[Any], dict[str, Any]]]:
    """(args, kwargs) of every sample of an op."""
    makers = SAMPLES.get(op) or SAMPLES.get(str(op))
    if not makers:
        found = "it has no samples" if rule_function(op) else _NO_RULE
        fix = "register_rule(op, samples=[...]), or pass args="
        raise InputError(f"check_rule({op})", found, fix)
    torch.manual_seed(0)
    drawn = [list(make()) for make in makers]
    return [(a, a.pop() if a and isinstance(a[-1], dict) else {}) for a in drawn]


def _check_split(
    call: OpCall,
    rule: Rule,
    whole: Result,
    sizes: Mapping[str, int],
    factors: frozenset[str],
    degree: int,
) -> None:
    def on_rank(axis: tuple[str, int, int]) -> Result:
        split = RankSplit(axis, sizes, factors)
        pieces = [_piece(x, split, spec) for x, spec in zip(call.tensors(), rule.ins, strict=True)]

        def weights(i: int, out: Tensor) -> Tensor:
            return _piece(weight_for(i, whole.outs[i]), split, rule.outs[i])

        return call.with_tensors(pieces).run(weights, lambda c: c.localized(rule, split))

    if factors & rule.inner:
        ranks = LocalGroup(degree).run(on_rank)
    else:
        ranks = [on_rank(("", degree, rank)) for rank in range(degree)]
    split = RankSplit(("", degree, 0), sizes, factors)
    from_operands = any(split.layout(spec) for spec in rule.ins)
    is_sum = from_operands and not factors & rule.inner
    for i, spec in enumerate(rule.outs):
        found = _rejoin([r.outs[i] for r in ranks], split, spec, is_sum)
        if call.op in UNDEFINED and found.shape == whole.outs[i].shape:
            continue
        _compare(call, rule, f"{_way(split)}: output {i}", found, whole.outs[i])
    _check_gradients(call, rule, whole, ranks, split)


def _check_gradients(
    call: OpCall, rule: Rule, whole: Result, ranks: list[Result], split: RankSplit
) -> None:
    """Gradients of split operands are pieces; those of whole operands are partial sums."""
    for i, spec in enumerate(rule.ins):
        grads = [rank.grads[i] for rank in ranks]
        expected = whole.grads[i]
        if expected is None and all(grad is None for grad in grads):
            continue
        zero = torch.zeros_like(call.tensors()[i])
        parts = [
            _piece(zero, split.on(rank), spec) if grad is None else grad
            for rank, grad in enumerate(grads)
        ]
        found = _rejoin(parts, split, spec, is_sum=True)
        what = f"{_way(split)}: gradient of operand {i}"
        _compare(call, rule, what, found, zero if expected is None else expected)


def _piece(x: Tensor, split: RankSplit, spec: Spec) -> Tensor:
    """One rank's part of a tensor."""
    layout = split.layout(spec)
    return x if layout is None else take(x, *layout, *split.axis[1:])


def _rejoin(parts: list[Tensor], split: RankSplit, spec: Spec, is_sum: bool) -> Tensor:
    layout = split.layout(spec)
    if layout is not None:
        return join(parts, *layout)
    return torch.stack(parts).sum(0).to(parts[0].dtype) if is_sum else parts[-1]


def _check_linear(call: OpCall, rule: Rule, group: tuple[int, ...]) -> None:
    """f(a + b) == f(a) + f(b), where a and b stand for all operands of the group."""
    generator = torch.Generator().manual_seed(1)
    base = call.tensors()

    def drawn(x: Tensor) -> Tensor:
        if not (x.is_floating_point() or x.is_complex()):
            return torch.randint(-9, 9, x.shape, generator=generator).to(x)
        return torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)

    def outs(group_values: Mapping[int, Tensor]) -> list[Tensor]:
        return call.with_tensors([group_values.get(i, x) for i, x in enumerate(base)]).run().outs

    a, b = ({i: drawn(base[i]) for i in group} for _ in range(2))
    both = outs({i: a[i] + b[i] for i in group})
    for i, (x, y, z) in enumerate(zip(outs(a), outs(b), both, strict=True)):
        _compare(call, rule, f"linear in operands {group}: output {i}", x + y, z)


def _sizes(call: OpCall, rule: Rule, outs: Sequence[Tensor]) -> dict[str, int]:
    """Sizes of all factors; checks that the rule has the rank of every tensor and its sizes."""
    tensors = [*call.tensors(), *outs]
    specs = (*rule.ins, *rule.outs)
    if len(rule.ins) != len(call.tensors()) or len(rule.outs) != len(outs):
        found = f"{len(call.tensors())} operands and {len(outs)} outputs"
        raise _wrong(call, rule, "number of tensors", found)
    if any(len(spec) != t.ndim for spec, t in zip(specs, tensors, strict=True)):
        raise _wrong(call, rule, "ranks", str([t.ndim for t in tensors]))
    dims = [
        (dim, size)
        for spec, t in zip(specs, tensors, strict=True)
        for dim, size in zip(spec, t.shape, strict=True)
    ]
    sizes = dict(rule.sizes)
    sizes |= {dim[0][0]: size for dim, size in dims if len(dim) == 1 and len(dim[0]) == 1}
    for dim, size in dims:
        made = sum(prod(sizes[name] for name in term) for term in dim)
        if made != size:
            text = f"its size is {size}, its factors make {made}"
            raise _wrong(call, rule, f"dim {spec_text((dim,))}", text)
    return sizes


def _compare(call: OpCall, rule: Rule, what: str, found: Tensor, expected: Tensor) -> None:
    exact = expected.dtype in (torch.float64, torch.complex128)
    tolerance = 1e-9 if exact else 1e-5
    try:
        torch.testing.assert_close(
            found, expected, rtol=tolerance, atol=tolerance, equal_nan=True, check_stride=False
        )
    except AssertionError as error:
        raise _wrong(call, rule, what, str(error)) from None


def _wrong(call: OpCall, rule: Rule, what: str, found: str) -> RuleError:
    shapes = ", ".join(str(list(t.shape)) for t in call.tensors())
    return RuleError(
        f"the rule of {call.op} on {shapes} is wrong: {what}.",
        f"rule {rule}; {' '.join(found.split())}",
        "make the factor whole, or correct the equation, `linear` or `local`.",
    )


def _way(split: RankSplit) -> str:
    return f"factor {' and '.join(sorted(split.factors))} {split.axis[1]} ways"
