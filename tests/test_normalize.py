"""One spelling of every op, and nothing that does nothing; numbers stay what they were."""

import math

import pytest
import torch
import torch.nn.functional as F
from captured import check_same, made, normalized, ops, rand
from torch import nn
from tpcompile.passes.inline_regions import inline_regions

from tpcompile.capture import capture
from tpcompile.dump import dump
from tpcompile.errors import CaptureError


def test_what_does_nothing_goes() -> None:
    """No-op casts, slices, views, dropouts and copies vanish; a linear's bias stands alone."""

    def forward(m, x):
        y = m.lin(x.view(-1, 4)).to(torch.float64)[:, :]
        y = F.dropout(y.reshape(y.shape), 0.1, False).contiguous().expand(-1, 4)
        return F.glu(y).t()

    program = check_same(made(forward), rand(2, 3, 4))
    assert (
        dump(program)
        == """\
lin.weight : f64[4, 4] = parameter
lin.bias : f64[4] = parameter
buf : f64[4] = buffer
args.0 : f64[b, s, 4] = input
%reshape_default : f64[b*s, 4] = reshape(args.0, [-1, 4])
%linear_default : f64[b*s, 4] = linear(%reshape_default, lin.weight)
%add_tensor : f64[b*s, 4] = add.Tensor(%linear_default, lin.bias)
%split_with_sizes_default : 2 x f64[b*s, 2] = split_with_sizes(%add_tensor, [2, 2], -1)
%getitem : f64[b*s, 2] = getitem(%split_with_sizes_default, 1)
%sigmoid_default : f64[b*s, 2] = sigmoid(%getitem)
%getitem_1 : f64[b*s, 2] = getitem(%split_with_sizes_default, 0)
%mul_tensor : f64[b*s, 2] = mul.Tensor(%getitem_1, %sigmoid_default)
%permute_default : f64[2, b*s] = permute(%mul_tensor, [1, 0])
return (%permute_default)
"""
    )


SPELLINGS = {
    "t": (lambda m, x: x.t(), ["permute"]),
    "mT": (lambda m, x: x.mT, ["permute"]),
    "swapaxes": (lambda m, x: x.swapaxes(0, -1), ["permute"]),
    "movedim": (lambda m, x: x.movedim(1, 0), ["permute"]),
    "flatten": (lambda m, x: x.flatten(), ["reshape"]),
    "unflatten": (lambda m, x: x.unflatten(1, (2, -1)), ["reshape"]),
    "view_as": (lambda m, x: m.buf.view_as(x[0]), []),
    "expand_as": (lambda m, x: m.buf.expand_as(x), ["expand"]),
    "broadcast_tensors": (
        lambda m, x: torch.broadcast_tensors(x, m.buf)[1],
        ["expand"],
    ),
    "chunk": (lambda m, x: x.chunk(3, 1)[1], ["split_with_sizes", "getitem"]),
    "split": (lambda m, x: x.split(3, 1)[1], ["split_with_sizes", "getitem"]),
    "and": (lambda m, x: (x > 0) & (x < 1), ["gt.Scalar", "lt.Scalar", "bitwise_and.Tensor"]),
    "type_as": (lambda m, x: (x > 0).type_as(x), ["gt.Scalar", "to.dtype"]),
    "addmm": (
        lambda m, x: torch.addmm(m.buf, x, m.lin.weight, beta=0.5, alpha=2),
        ["mm", "mul.Tensor", "mul.Tensor", "add.Tensor"],
    ),
    "baddbmm": (
        lambda m, x: torch.baddbmm(x[None], x[None], m.lin.weight[None], beta=0),
        ["unsqueeze", "unsqueeze", "bmm"],
    ),
    "addmv": (lambda m, x: torch.addmv(x[:, 0], x, m.buf), ["select.int", "mv", "add.Tensor"]),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str) -> None:
    """Each op that is another in disguise is spelled as that other, and gives the same."""
    function, expected = SPELLINGS[name]
    program = check_same(made(function), rand(3, 4), dynamic=False)
    assert [op.removeprefix("<built-in function ").rstrip(">") for op in ops(program)] == expected


CONVS = [
    (nn.Conv1d(3, 4, 3), (2, 3, 8)),
    (nn.Conv1d(3, 4, 3, padding="same"), (3, 8)),
    (nn.Conv2d(3, 4, 3, groups=1), (2, 3, 6, 6)),
    (nn.ConvTranspose1d(3, 4, 3), (2, 3, 8)),
    (nn.ConvTranspose2d(3, 4, 3, stride=2), (2, 3, 4, 4)),
    (nn.Conv3d(2, 2, 2), (1, 2, 3, 3, 3)),
]


@pytest.mark.parametrize("case", CONVS, ids=lambda case: f"{type(case[0]).__name__}{case[1]}")
def test_a_convolution_adds_its_bias_after(case: tuple[nn.Module, tuple[int, ...]]) -> None:
    """So that it is added once where the input channels are split."""
    conv, shape = case
    model = made(lambda m, x: m.conv(x), conv=conv.double())
    program = check_same(model, rand(*shape), dynamic=False)
    assert [op.split(".")[0] for op in ops(program)][1:] == ["reshape", "add"]


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": torch.ones(6, 6, dtype=torch.bool).tril()},
    "blind": {"attn_mask": torch.ones(6, 6, dtype=torch.bool).tril(-1)},
    "float": {"attn_mask": torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(6, 6)},
    "scale": {"scale": 0.3},
    "grouped": {"enable_gqa": True, "is_causal": True},
}


@pytest.mark.parametrize("name", MASKS)
def test_attention_with_dropout(name: str) -> None:
    """It becomes its math, with dropout as an op of its own, on the same random numbers."""

    def forward(m, x):
        q = m.lin(x).unflatten(-1, (2, 2)).transpose(1, 2)
        k = q[:, :1] if name == "grouped" else q * 2
        return F.scaled_dot_product_attention(q, k, k, dropout_p=0.5, **MASKS[name])

    program = check_same(made(forward), rand(2, 6, 4))
    assert ops(program).count("dropout") == 1
    assert "scaled_dot_product_attention" not in ops(program)


def test_attention_without_dropout_stays() -> None:
    """It is one op, which has its own rule."""
    model = made(lambda m, x: F.scaled_dot_product_attention(x, x, x, is_causal=True))
    assert ops(check_same(model, rand(2, 1, 5, 4))) == ["scaled_dot_product_attention"]


def test_arguments_go_by_position() -> None:
    """As far as they go, and the rest in the schema's order; nothing is filled in."""
    program = check_same(
        made(lambda m, x: torch.sum(input=x, dim=(1,), keepdim=True).softmax(dim=0)), rand(3, 4)
    )
    assert [(node.args[1:], node.kwargs) for node in program.calls()] == [
        (([1], True), {}),
        ((0,), {}),
    ]


def test_no_grad_detaches_what_is_read() -> None:
    """Once each; what is made inside needs none."""

    def forward(m, x):
        y = m.lin(x)
        with torch.no_grad():
            scale = m.lin(y).amax() + y.mean()
        return y / scale

    check_same(made(forward), rand(3, 4))
    program = inline_regions(capture(made(forward), (rand(3, 4),), {}, dynamic=False))
    assert (
        dump(program)
        == """\
lin.weight : f64[4, 4] = parameter
lin.bias : f64[4] = parameter
buf : f64[4] = buffer
args.0 : f64[3, 4] = input
%linear : f64[3, 4] = linear(args.0, lin.weight, lin.bias)
%detach_default : f64[3, 4] = detach(%linear)  # lin
%detach_default_1 : f64[4, 4] = detach(lin.weight)
%detach_default_2 : f64[4] = detach(lin.bias)
%linear_default : f64[3, 4] = linear(%detach_default, %detach_default_1, %detach_default_2)  # lin
%amax_default : f64[] = amax(%linear_default)
%mean_default : f64[] = mean(%detach_default)
%add_tensor : f64[] = add.Tensor(%amax_default, %mean_default)
%div : f64[3, 4] = div.Tensor(%linear, %add_tensor)
return (%div)
"""
    )


def test_nested_gradient_modes() -> None:
    """enable_grad inside no_grad lets gradients flow to what it reads itself."""

    def forward(m, x):
        y = m.lin(x)
        with torch.no_grad():
            z = m.lin(y)
            with torch.enable_grad():
                w = m.lin(z) + y
        return y * z + w

    check_same(made(forward), rand(3, 4))


def test_autocast_becomes_casts() -> None:
    """An autocast region, with one off and a no_grad inside, gives what eager gives (in bf16)."""

    def forward(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(x, m.lin.weight)
            loss = F.cross_entropy(y, y.argmax(-1)) + F.mse_loss(y, x)
            with torch.autocast("cpu", enabled=False):
                z = y.float() @ m.lin.weight
            with torch.no_grad():
                w = F.linear(y, m.lin.weight)
            e = torch.einsum("bi,ji->bj", x, m.lin.weight)
        return y, z, w, e, loss

    model = made(forward).float()
    program = check_same(model, rand(3, 4).float(), close=2e-3)
    # y and the weight
    assert ops(program).count("detach") == 2


def test_ambient_autocast_is_captured() -> None:
    """Autocast around the model is part of the graph, which runs without it."""
    model = made(lambda m, x: F.linear(x, m.lin.weight).sum()).float()
    with torch.autocast("cpu", torch.bfloat16):
        program = normalized(model, torch.ones(3, 4))
    assert ops(program) == ["to.dtype", "to.dtype", "linear", "sum"]


def test_functions_of_functions_are_refused() -> None:
    """torch.cond and vmap run Python functions as one op."""
    for function, what in (
        (lambda m, x: torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,)), "cond"),
        (lambda m, x: torch.vmap(lambda row: row * math.pi)(x), "vmap"),
    ):
        with pytest.raises(CaptureError) as error:
            normalized(made(function), rand(3, 4))
        assert str(error.value).splitlines()[0] == f"cannot capture {what}."
