"""In-place ops become new values: whatever is written, through whatever views."""

import torch
from captured import Made, check_same, made, normalized, ops, rand
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pytest
from tpcompile.capture import capture
from tpcompile.dump import dump
from tpcompile.errors import CaptureError
from tpcompile.passes.functionalize import functionalize

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
    "masked_fill_": lambda t: t.masked_fill_(torch.ones(t.shape, dtype=torch.bool).triu(), 0.5)
    if t.ndim == 2
    else t,
    "index_fill_": lambda t: t.index_fill_(0, torch.tensor([0]), 2.0),
    "out": lambda t: torch.add(torch.ones(()), torch.full(t.shape, 2.0), out=t)
    if not t.requires_grad and t.dtype == torch.float32
    else t,
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
    """A write to a selected row is scattered back into its base, and other views see it."""

    def forward(m, x):
        y = m.lin(x)
        flat, row = y.view(-1), y[1]
        row.mul_(2)
        return flat

    program = functionalize(capture(made(forward), (rand(3, 4),), {}, dynamic=False))
    assert (
        dump(program)
        == """\
"""
    )
