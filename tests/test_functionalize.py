"""In-place ops become new values: whatever is written, through whatever views."""

import pytest
import torch
from captured import Made, check_same, made, normalized, ops, rand
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from tpcompile.passes.functionalize import functionalize

from tpcompile.capture import capture
from tpcompile.dump import dump
from tpcompile.errors import CaptureError

VIEWS = {
    "slice": lambda t: t[..., 1:3],
    "step": lambda t: t[::2],
    "select": lambda t: t[-1] if t.ndim > 1 else t,
    "last": lambda t: t[..., -1] if t.ndim > 1 else t,
    "transpose": lambda t: t.transpose(0, -1),
    "permute": lambda t: t.permute(*range(1, t.ndim), 0),
    "unsqueeze": lambda t: t.unsqueeze(1),
    "squeeze": lambda t: t.unsqueeze(0).squeeze(0),
    "flat": lambda t: t.flatten(),
    "reshape": lambda t: t.reshape(-1, 1),
    "view": lambda t: t.view(t.shape),
    "unflatten": lambda t: t.unflatten(-1, (1, -1)),
    "narrow": lambda t: t.narrow(0, 0, 1),
    "movedim": lambda t: t.movedim(0, -1),
    "numpy_T": lambda t: t.mT if t.ndim > 1 else t,
    "diagonal": lambda t: t.diagonal() if t.ndim > 1 else t,
    "same": lambda t: t.to(t.dtype).contiguous(),
    "detached": lambda t: t if t.requires_grad else t.detach(),
    "dropout": lambda t: nn.functional.dropout(t, 0.5, False),
    "item": lambda t: t if t.requires_grad else t.split(1)[0],
    "unbind": lambda t: t if t.requires_grad else t.unbind(-1)[-1],
}
WRITES = {
    "add_": lambda t: t.add_(1.5),
    "mul_": lambda t: t.mul_(-2),
    "zero_": lambda t: t.zero_(),
    "fill_": lambda t: t.fill_(3),
    "copy_": lambda t: t.copy_(torch.full((), 0.25)),
    "neg_": lambda t: t.neg_(),
    "clamp_": lambda t: t.clamp_(-1, 2) if not t.requires_grad else t,
    "set": lambda t: t.__setitem__(0, 7.0),
    "masked_fill_": lambda t: (
        t.masked_fill_(torch.ones(t.shape, dtype=torch.bool).triu(), 0.5) if t.ndim == 2 else t
    ),
    "index_fill_": lambda t: t.index_fill_(0, torch.tensor([0]), 2.0),
    "out": lambda t: (
        torch.add(torch.ones(()), torch.full(t.shape, 2.0), out=t)
        if not t.requires_grad and t.dtype == torch.float32
        else t
    ),
}
STEP = st.tuples(
    st.integers(0, 20), st.one_of(st.sampled_from(sorted(VIEWS)), st.sampled_from(sorted(WRITES)))
)


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(STEP, min_size=2, max_size=10), source=st.sampled_from(["lin", "buf", "x"]))
def test_any_chain_of_views_and_writes(steps: list[tuple[int, str]], source: str) -> None:
    """Every alias, buffer and input has the value and gradient that eager gives."""

    def forward(m, x):
        base = {"lin": m.lin(x).clone(), "buf": m.buf2, "x": x}[source]
        alive = [base]
        for index, name in steps:
            t = alive[index % len(alive)]
            if name in WRITES:
                WRITES[name](t)
            elif t.ndim and (new := VIEWS[name](t)).numel():
                alive.append(new)
        return [t + 0 for t in alive]

    model = made(forward)
    model.register_buffer("buf2", rand(3, 4, seed=5))
    program = check_same(model, rand(3, 4), dynamic=False)
    assert not any(op.split(".")[0].endswith("_") for op in ops(program))


def test_a_write_through_a_view() -> None:
    """A write to a row is scattered back into its base, and the base's other view is made anew."""

    def forward(m, x):
        y = m.lin(x)
        flat, row = y.view(-1), y[1]
        row.mul_(2)
        return flat

    program = functionalize(capture(made(forward), (rand(3, 4),), {}, dynamic=False))
    assert (
        dump(program)
        == """\
lin.weight : f64[4, 4] = parameter
lin.bias : f64[4] = parameter
buf : f64[4] = buffer
args.0 : f64[3, 4] = input
%linear : f64[3, 4] = linear(args.0, lin.weight, lin.bias)
%view : f64[12] = view(%linear, [-1])
%select : f64[4] = select.int(%linear, 0, 1)
%mul_tensor : f64[4] = mul.Tensor(%select, 2)
%select_scatter_default : f64[3, 4] = select_scatter(%linear, %mul_tensor, 0, 1)
%reshape_default : f64[12] = reshape(%select_scatter_default, [-1])
return (%reshape_default)
"""
    )
    check_same(made(forward), rand(3, 4))


def test_updates_of_buffers_and_inputs() -> None:
    """What forward writes to buffers and inputs are trailing outputs, in placeholder order."""

    def forward(m, x):
        m.buf.add_(x.mean(0))
        x.mul_(2)
        return m.lin(x) * m.buf

    program = check_same(made(forward), rand(3, 4))
    assert program.n_outputs == 1
    assert [program.leaves[name].name for name in program.updates] == ["buf", "args.0"]
    assert len(program.output().args[0]) == 3


def test_an_assigned_buffer_is_an_update() -> None:
    """`self.buf = self.buf + 1` keeps its new value, also with a write before."""

    def forward(m, x):
        m.buf.mul_(3)
        m.buf = m.buf + x.mean(0)
        return m.lin(x) + m.buf

    model = made(forward)
    before = model.buf
    program = normalized(model, rand(3, 4))
    assert [program.leaves[name].name for name in program.updates] == ["buf"]
    assert model.buf is before
    reference = made(forward)
    check_updates = reference.buf * 3 + rand(3, 4).mean(0)
    reference(rand(3, 4))
    torch.testing.assert_close(reference.buf, check_updates)


@pytest.mark.parametrize("momentum", [0.1, 0.7])
def test_batch_norm_in_training(momentum: float) -> None:
    """Running statistics and the batch counter are updates; called twice, the second sees both."""
    norm = nn.BatchNorm2d(3, momentum=momentum)
    program = check_same(made(lambda m, x: m.norm(m.norm(x)), norm=norm), rand(2, 3, 4, 5))
    names = [program.leaves[name].name for name in program.updates]
    assert names == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


def test_batch_norm_in_evaluation() -> None:
    """Nothing is written."""
    model = made(lambda m, x: m.norm(x), norm=nn.BatchNorm1d(4)).eval()
    assert check_same(model, rand(3, 4)).updates == ()


def test_spectral_norm_in_training() -> None:
    """`out=` writes to buffers under no_grad; the parameter's gradient is eager's."""
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    program = check_same(made(lambda m, x: m.layer(x), layer=layer), rand(3, 4))
    assert len(program.updates) == 2


def test_random_numbers_in_place() -> None:
    """The generator is used as eager uses it."""

    def forward(m, x):
        y = torch.empty_like(x).uniform_() + torch.empty_like(x).normal_()
        return m.lin(x) * y * torch.empty_like(x).bernoulli_(0.5)

    check_same(made(forward), rand(3, 4))


def test_a_write_that_autograd_does_not_see() -> None:
    """Writing under no_grad to what needs a gradient is refused: no new value would be the same."""

    class Clamped(Made):
        def forward(self, x):
            """Clamp a weight on the way."""
            with torch.no_grad():
                self.lin.weight.clamp_(-0.1, 0.1)
            return self.lin(x)

    with pytest.raises(CaptureError) as error:
        normalized(Clamped(None), torch.ones(3, 4))
    line = Clamped.forward.__code__.co_firstlineno + 3
    assert str(error.value) == (
        "cannot capture an in-place op that autograd does not see.\n"
        f"  test_functionalize.py:{line} writes under no_grad (or through detach or .data) to a "
        "tensor that needs a gradient.\n"
        "  fix: compute a new tensor instead, or do it outside of forward."
    )


def test_an_in_place_op_that_has_no_functional_form() -> None:
    """`t_` changes the tensor object itself."""
    with pytest.raises(CaptureError) as error:
        normalized(made(lambda m, x: m.lin(x).t_()), rand(3, 4))
    assert str(error.value) == (
        "cannot capture the in-place op aten.t_.default.\n"
        "  captured.py:31 calls it.\n"
        "  fix: use the op that returns a new tensor."
    )
