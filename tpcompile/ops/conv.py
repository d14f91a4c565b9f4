"""Convolutions, pools and resizes: batch and channels split, positions are whole."""

from functools import partial
from typing import Any

from torch import Tensor, randn

from tpcompile.ops.equations import Shaped, aten, each_alone, equation
from tpcompile.rule import Call, Local, Rule, Split, rule


def _product(*parts: tuple[str, int]) -> str:
    """Equation text of a product, parts of size 1 left out."""
    names = [name for name, size in parts if size != 1]
    return f"({' '.join(names)})" if len(names) > 1 else "".join(names) or "1"


def _positions(letter: str, count: int) -> str:
    return " ".join(f"{letter}{i}" for i in range(count))


def _with_local_groups(op: Any, defaults: tuple[Any, ...]) -> Local:
    """The same call with this rank's groups, the last of `(x, weight, *defaults, groups)`."""

    def local(split: Split, *args: Any, **kwargs: Any) -> Call:
        if not split.is_split("g"):
            return op, args, kwargs
        before = (*args, *defaults[len(args) - 2 :])[: 2 + len(defaults)]
        kwargs.pop("groups", None)
        return op, (*before, split.local_size("g"), *args[3 + len(defaults) :]), kwargs

    return local


def convolution(
    op: Any,
    x: Shaped,
    weight: Shaped,
    bias: Shaped | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Rule:
    """x: [*b, (g c), *s], weight: [(g o), c, *k] -> [*b, (g o), *t]. Split c: partial sums.

    A bias would be added once on each rank, so it keeps c whole; a pass splits biases off.
    """
    sizes = {"g": groups, "o": weight.shape[0] // groups, "c": weight.shape[1]}
    g, o, c = sizes.items()
    s, k, t = (_positions(letter, weight.ndim - 2) for letter in "skt")
    one, zero = [1] * (weight.ndim - 2), [0] * (weight.ndim - 2)
    given = [] if bias is None else [bias]
    out = _product(g, o)
    added = f", {out}" * len(given)
    text = f"*b {_product(g, c)} {s}, {out} {_product(c)} {k}{added} -> *b {out} {t}"
    return equation(
        text,
        *(x, weight, *given),
        whole=f"*s *k *t{' c' * len(given)}",
        sizes=sizes,
        linear=() if given else each_alone(2),
        local=_with_local_groups(op, (None, one, zero, one)) if groups > 1 else None,
    )


def _depthwise(n: int) -> tuple[Tensor, Tensor]:
    return randn(2, 4, *[3] * n), randn(4, 1, *[2] * n)


def _grouped(n: int) -> tuple[Tensor, Tensor]:
    return randn(2, 12, *[3] * n), randn(6, 4, *[2] * n)


for _dims, _op in enumerate(aten("conv1d conv2d conv3d"), 1):
    rule(
        _op,
        samples=[
            lambda n=_dims: (randn(2, 4, *[5] * n), randn(6, 4, *[3] * n), None, [2] * n, [1] * n),
            lambda n=_dims: (*_depthwise(n), None, [1] * n, [0] * n, [1] * n, 4),
            lambda n=_dims: (*_grouped(n), randn(6), [1] * n, [0] * n, [1] * n, 3),
            lambda n=_dims: (*_grouped(n), {"groups": 3}),
            lambda n=_dims: (randn(4, *[4] * n), randn(6, 4, *[4] * n), randn(6)),
        ],
    )(partial(convolution, _op))
for _dims, _op in enumerate(aten("conv1d.padding conv2d.padding conv3d.padding"), 1):
    rule(
        _op,
        samples=[
            lambda n=_dims: (randn(2, 4, *[5] * n), randn(6, 4, *[3] * n), None, [1] * n, "same"),
            lambda n=_dims: (*_depthwise(n), None, [1] * n, "valid", [1] * n, 4),
        ],
    )(partial(convolution, _op))


def transposed_convolution(
    op: Any,
    x: Shaped,
    weight: Shaped,
    bias: Shaped | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Rule | None:
    """x: [*b, c, *s], weight: [c, o, *k] -> [*b, o, *t]. None for groups."""
    if groups > 1:
        return None
    s, k, t = (_positions(letter, weight.ndim - 2) for letter in "skt")
    given = [] if bias is None else [bias]
    text = f"*b c {s}, c o {k}{', o' * len(given)} -> *b o {t}"
    whole = f"*s *k *t{' c' * len(given)}"
    return equation(text, x, weight, *given, whole=whole, linear=() if given else each_alone(2))


for _dims, _op in enumerate(
    aten("conv_transpose1d conv_transpose2d.input conv_transpose3d.input"), 1
):
    rule(
        _op,
        samples=[
            lambda n=_dims: (randn(2, 4, *[3] * n), randn(4, 6, *[2] * n), None, [2] * n),
            lambda n=_dims: (randn(2, 4, *[3] * n), randn(4, 6, *[2] * n), randn(6)),
        ],
    )(partial(transposed_convolution, _op))


def resized(count: int, linear: bool, n_outs: int, x: Shaped, *args: Any, **kwargs: Any) -> Rule:
    """x: [*b, *s] -> [*b, *t], the last `count` dims s and t whole."""
    s, t = _positions("s", count), _positions("t", count)
    outs = ", ".join([f"*b {t}"] * n_outs)
    return equation(f"*b {s} -> {outs}", x, whole="*s *t", linear=((0,),) if linear else ())


def _register_resized(names: str, linear: bool, *options: Any, n_outs: int = 1) -> None:
    for op in aten(names):
        count = next(int(c) for c in op.name() if c.isdigit())
        samples = [
            lambda shape=shape, n=count: (randn(*shape, *[4] * n), *(o(n) for o in options))
            for shape in ((2, 3), (3, 1))
        ]
        rule(op, samples=samples)(partial(resized, count, linear, n_outs))


_register_resized("max_pool1d max_pool2d max_pool3d", False, lambda n: [2] * n)
_register_resized("max_pool2d_with_indices", False, lambda n: [2] * n, n_outs=2)
_register_resized("avg_pool1d avg_pool2d avg_pool3d", True, lambda n: [2] * n)
_register_resized(
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d", True, lambda n: [2] * n
)
_register_resized("adaptive_max_pool2d", False, lambda n: [2] * n, n_outs=2)
_register_resized(
    "upsample_nearest1d.vec upsample_nearest2d.vec", True, lambda n: [8] * n, lambda n: None
)
_register_resized(
    "upsample_linear1d.vec upsample_bilinear2d.vec upsample_bicubic2d.vec",
    True,
    lambda n: [8] * n,
    lambda n: False,
    lambda n: None,
)


@rule(
    *aten("pixel_shuffle"), samples=[lambda: (randn(2, 12, 3, 4), 2), lambda: (randn(4, 3, 3), 2)]
)
def pixel_shuffle(x: Shaped, upscale_factor: int) -> Rule:
    """x: [*b, (c p q), h, w] -> [*b, c, (h p), (w q)]. p and q whole."""
    n = upscale_factor
    sizes = {"c": x.shape[-3] // n**2, "p": n, "q": n}
    c, p, q = sizes.items()
    h, w = ("h", x.shape[-2]), ("w", x.shape[-1])
    text = f"*b {_product(c, p, q)} h w -> *b {_product(c)} {_product(h, p)} {_product(w, q)}"
    return equation(text, x, whole="p q", sizes=sizes, linear=((0,),))
