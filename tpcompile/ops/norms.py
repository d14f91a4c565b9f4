"""Normalizations: the normalized dims are whole, all others pass."""

from collections.abc import Sequence
from typing import Any

from torch import ops, rand, randn

from tpcompile.ops.equations import Shaped, aten, equation, names_in, reduced, spec_for, wrap
from tpcompile.rule import Call, Rule, Split, rule


def _normalized(x: Shaped, count: int, weights: Sequence[Shaped | None]) -> Rule:
    """x: [*b, *d], weights: [*d] -> [*b, *d]; the `count` dims d are whole."""
    names = " ".join(f"d{i}" for i in range(count))
    given = [w for w in weights if w is not None]
    text = f"*b {names}{f', {names}' * len(given)} -> *b {names}"
    return equation(text, x, *given, whole="*d")


@rule(
    *aten("layer_norm"),
    samples=[
        lambda: (randn(2, 4, 6), [6], randn(6), randn(6)),
        lambda: (randn(2, 4, 6), [6]),
        lambda: (randn(2, 4, 6), [4, 6], randn(4, 6)),
    ],
)
def layer_norm(
    x: Shaped,
    normalized_shape: Sequence[int],
    weight: Shaped | None = None,
    bias: Shaped | None = None,
    *rest: Any,
) -> Rule:
    """x: [*b, *d], weight, bias: [*d] -> [*b, *d]. d whole."""
    return _normalized(x, len(normalized_shape), (weight, bias))


@rule(
    *aten("rms_norm"),
    samples=[
        lambda: (randn(2, 4, 6), [6], randn(6), 1e-6),
        lambda: (randn(2, 4, 6), [4, 6]),
    ],
)
def rms_norm(
    x: Shaped,
    normalized_shape: Sequence[int],
    weight: Shaped | None = None,
    eps: float | None = None,
) -> Rule:
    """x: [*b, *d], weight: [*d] -> [*b, *d]. d whole."""
    return _normalized(x, len(normalized_shape), (weight,))


@rule(
    *aten("group_norm"),
    samples=[
        lambda: (randn(2, 12, 3), 4, randn(12), randn(12)),
        lambda: (randn(2, 4, 3, 3), 4),
        lambda: (randn(2, 6, 3), 1, randn(6)),
    ],
)
def group_norm(
    x: Shaped,
    num_groups: int,
    weight: Shaped | None = None,
    bias: Shaped | None = None,
    *rest: Any,
) -> Rule:
    """x: [n, (g c), *s], weight, bias: [(g c)] -> [n, (g c), *s]. Only n and g split."""
    per_group = x.shape[1] // num_groups
    channel = "(g c)" if num_groups > 1 and per_group > 1 else "g" if num_groups > 1 else "c"
    given = [w for w in (weight, bias) if w is not None]
    text = f"n {channel} *s{f', {channel}' * len(given)} -> n {channel} *s"

    def local(split: Split, x: Any, num_groups: int, *args: Any) -> Call:
        groups = split.local_size("g") if split.is_split("g") else num_groups
        return ops.aten.group_norm.default, (x, groups, *args), {}

    sizes = {"g": num_groups, "c": per_group}
    return equation(text, x, *given, whole="c *s", sizes=sizes, local=local)


@rule(
    *aten("batch_norm"),
    samples=[
        lambda: (
            *(randn(4, 6, 3), randn(6), randn(6), randn(6), rand(6) + 0.5),
            *(False, 0.1, 1e-5, False),
        ),
        lambda: (randn(4, 6), None, None, randn(6), rand(6) + 0.5, False, 0.1, 1e-5, False),
    ],
)
def batch_norm(
    x: Shaped,
    weight: Shaped | None,
    bias: Shaped | None,
    running_mean: Shaped | None,
    running_var: Shaped | None,
    training: bool,
    *rest: Any,
) -> Rule | None:
    """x: [n, c, *s], all others: [c] -> [n, c, *s]. None in training: statistics span the batch."""
    if training:
        return None
    given = [w for w in (weight, bias, running_mean, running_var) if w is not None]
    return equation(f"n c *s{', c' * len(given)} -> n c *s", x, *given)


@rule(
    *aten("_weight_norm"),
    samples=[
        lambda: (randn(4, 6), randn(4, 1)),
        lambda: (randn(4, 6, 3), randn(1, 1, 3), 2),
        lambda: (randn(4, 6), randn(1), -1),
    ],
)
def weight_norm(v: Shaped, g: Shaped, dim: int = 0) -> Rule:
    """v: [n, *k], g: [n, 1] -> [n, *k]. Only the dim that has its own norms splits."""
    spec = spec_for(v.shape)
    kept = [] if dim == -1 else [wrap(dim, v.ndim)]
    scale = tuple(spec[i] if i in kept else ((),) for i in range(g.ndim))
    whole = names_in(reduced(spec, kept, keepdim=False))
    return Rule((spec, scale), (spec,), whole, linear=((1,),))


@rule(
    *aten("cosine_similarity"),
    samples=[lambda: (randn(4, 6), randn(4, 6)), lambda: (randn(4, 6), randn(4, 6), 0)],
)
def cosine_similarity(a: Shaped, b: Shaped, dim: int = 1, eps: float = 1e-8) -> Rule | None:
    """a, b: [*b, d] -> [*b]. d whole. None where the operands are broadcast."""
    if tuple(a.shape) != tuple(b.shape):
        return None
    spec, dim = spec_for(a.shape), wrap(dim, a.ndim)
    out = reduced(spec, [dim], keepdim=False)
    return Rule((spec, spec), (out,), names_in((spec[dim],)))


@rule(
    *aten("instance_norm"),
    samples=[
        lambda: (randn(4, 6, 3), randn(6), randn(6), None, None, True, 0.1, 1e-5, False),
        lambda: (randn(4, 6, 3, 2), None, None, None, None, True, 0.1, 1e-5, False),
    ],
)
def instance_norm(
    x: Shaped,
    weight: Shaped | None,
    bias: Shaped | None,
    running_mean: Shaped | None,
    running_var: Shaped | None,
    *rest: Any,
) -> Rule | None:
    """x: [n, c, *s], weight, bias: [c] -> [n, c, *s]. s whole. None with running statistics."""
    if running_mean is not None or running_var is not None:
        return None
    given = [w for w in (weight, bias) if w is not None]
    return equation(f"n c *s{', c' * len(given)} -> n c *s", x, *given, whole="*s")


@rule(
    *aten("prelu"),
    samples=[lambda: (randn(2, 4, 3), rand(4)), lambda: (randn(2, 4, 3), rand(1))],
)
def prelu(x: Any, weight: Any) -> Rule:
    """x: [n, c, *s], weight: [c] -> [n, c, *s]."""
    spec = spec_for(x.shape)
    shared = weight.ndim == 0 or weight.shape[0] == 1
    channel = ((),) if shared else spec[min(1, x.ndim - 1)]
    return Rule((spec, (channel,) * weight.ndim), (spec,))
