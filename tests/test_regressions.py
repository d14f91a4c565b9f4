"""The smallest models that showed a fault, each with the fault it showed."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plans import TINY
from torch import Tensor, fx, nn
from torch.distributed.tensor import Shard

import tpcompile
from tpcompile.plan import Plan
from tpcompile.strategies import Choices, Strategy

HIDDEN = 8


def checked(model: nn.Module, *inputs: Any, tp: int = 2, **options: Any) -> Plan:
    """The plan of a model that agrees with one device in float64."""
    report = tpcompile.verify(model.double(), inputs, tp=tp, **options)
    assert report.ok, report
    return report.plan


def rand(*shape: int) -> Tensor:
    """Random numbers, the same ones always."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Mlp(nn.Module):
    """A pre-norm block."""

    def __init__(self, act: Any = F.gelu) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """x: [*b, hidden] -> [*b, hidden]."""
        return x + self.down(self.act(self.up(self.norm(x))))


class MaskTable(nn.Module):
    """Attention with a causal mask cut out of a table that is longer than the sequence."""

    def __init__(self, longest: int = 32) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.v, self.o = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("seen", torch.ones(longest, longest).bool().tril())

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, s, hidden] -> [b, s, hidden]."""
        q, k, v = (f(x).unflatten(-1, (4, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        length = k.shape[-2]
        scores = (q @ k.mT).where(self.seen[:length, :length], -1e9)
        return x + self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_table_is_cut_to_a_symbolic_length(sequence_parallel: bool) -> None:
    """The cut table has the sequence's size, not its own: 32 rows are more than `s` of them."""
    checked(MaskTable(), rand(2, 8, HIDDEN), tp=4, sequence_parallel=sequence_parallel)


def test_reading_a_size_gathers_nothing() -> None:
    """A length that turns out to be fixed is a number, not a reason to have q, k and v whole."""
    plan = checked(MaskTable(longest=8), rand(2, 8, HIDDEN), sequence_parallel=False)
    assert [c.kind for c in plan.collectives if c.path.endswith(("q", "k", "v"))] == []


class Filled(nn.Module):
    """A value is put together in a tensor made like another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, 16), nn.Linear(HIDDEN, 16)
        self.down = nn.Linear(16, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, s, hidden] -> [b, s, hidden]."""
        a, b = self.a(x).unflatten(-1, (4, 4)), self.b(x).unflatten(-1, (4, 4))
        both = a.new_empty(*a.shape[:-1], 8)
        both[..., :4] = a
        both[..., 4:] = b
        return self.down(F.silu(both[..., 2:6]).flatten(2))


def test_a_tensor_made_like_another_gathers_nothing() -> None:
    """`new_empty` reads no values, so what it is made like may stay split."""
    plan = checked(Filled(), rand(2, 4, HIDDEN), sequence_parallel=False)
    assert [c.forward for c in plan.collectives if c.forward] == ["all_reduce"]


class Mixed(nn.Module):
    """Of two readers of a value one sends a gradient back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, s, hidden] -> [b, s, hidden]."""
        x = self.first(x).tanh()
        return self.last(x.neg() + torch.zeros_like(x))


def test_a_reader_without_gradient_shares_a_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two equal conversions the one that a gradient comes back through is kept."""
    kinds = {"tanh": "star", "neg": "partial", "zeros_like": "partial", "add": "partial"}
    possible = Choices.strategies

    def strategies(self: Choices, node: fx.Node) -> list[Strategy]:
        kind = kinds.get(node.name)
        return [replace(s, ticks=1e9 * (kind not in (None, s.kind))) for s in possible(self, node)]

    monkeypatch.setattr(Choices, "strategies", strategies)
    plan = checked(Mixed(), rand(2, 4, HIDDEN))
    assert [c.kind for c in plan.collectives].count("to_partial") == 1


class Universal(nn.Module):
    """One block, applied again and again."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.block = times, Mlp()

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, s, hidden] -> [b, s, hidden]."""
        for _ in range(self.times):
            x = self.block(x)
        return x


def test_shared_blocks_are_planned_where_exact_is_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers tied to one another by their weights get a plan, here as cheap as the cheapest."""
    exact = checked(Universal(3), rand(2, 8, HIDDEN))
    monkeypatch.setattr("tpcompile.solver.LIMIT", 300)
    cheap = checked(Universal(3), rand(2, 8, HIDDEN))
    assert not any("not proved the cheapest" in note for note in exact.notes)
    assert any("not proved the cheapest" in note for note in cheap.notes)
    assert cheap.seconds == exact.seconds


class Rounded(torch.autograd.Function):
    """A straight-through estimate that scales what comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        """x: [*b] -> [*b]."""
        ctx.scale = scale
        return (x * scale).round() / scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Not the derivative of the forward."""
        return grad * ctx.scale, None


class Gated(torch.autograd.Function):
    """Two operands, of which it saves what it computed of one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate: [*b] -> [*b]."""
        gate = gate.sigmoid()
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The true derivatives."""
        x, gate = ctx.saved_tensors
        return grad * gate, grad * x * gate * (1 - gate)


@pytest.mark.parametrize(
    "act", [lambda x: Rounded.apply(x, 4.0), lambda x: Gated.apply(x, x.exp())], ids=["one", "two"]
)
def test_an_elementwise_autograd_function_is_one_op(act: Any) -> None:
    """It runs on the split value, forward and backward as it is written."""
    pins = {"up.weight": Shard(0), "down.weight": Shard(1)}
    plan = checked(Mlp(act), rand(2, 4, HIDDEN), sequence_parallel=False, plan=pins)
    assert [c.forward for c in plan.collectives if c.forward] == ["all_reduce"]


class Normalized(nn.Module):
    """A linear of what is divided by a number that the data decide."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp(F.relu)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, hidden] -> [b, s, hidden]."""
        y = self.mlp(x)
        return y / (1.0 + y.detach().abs().max().item())


def test_numbers_taken_from_tensors() -> None:
    """`item()` reads a whole tensor, and what it gives is no dim."""
    pins = {"mlp.up.weight": Shard(0), "mlp.down.weight": Shard(1)}
    plan = checked(Normalized(), rand(2, 4, HIDDEN), sequence_parallel=False, plan=pins)
    assert [c.forward for c in plan.collectives if c.forward] == ["all_reduce"]


class Picked(nn.Module):
    """Each token takes the matrices of the one expert with the highest score."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, HIDDEN, 32) / 4)
        self.down = nn.Parameter(torch.randn(4, 32, HIDDEN) / 4)

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, s, hidden] -> [b, s, hidden]."""
        tokens = x.flatten(0, 1)
        weight, expert = self.router(tokens).softmax(-1).max(-1)
        h = F.gelu(torch.bmm(tokens[:, None], self.up[expert]))
        y = torch.bmm(h, self.down[expert])[:, 0] * weight[:, None]
        return x + y.view_as(x)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_experts_picked_by_an_index(sequence_parallel: bool) -> None:
    """Their matrices are split as those of an MLP."""
    plan = checked(Picked(), rand(2, 4, HIDDEN), sequence_parallel=sequence_parallel, hardware=TINY)
    styles = {p.name: p.style for p in plan.parameters}
    assert (styles["up"], styles["down"]) == ("column", "row")


class Torch(nn.Module):
    """Layers as torch.nn has them: an encoder layer, and cross attention to its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.cross = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """x: [b, s, 16], memory: [b, t, 16] -> [b, s, 16]."""
        y = self.layer(x)
        return y + self.cross(y, memory, memory, need_weights=False)[0]


@pytest.mark.parametrize("tp", [2, 3, 4, 8])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_of_torch(tp: int, sequence_parallel: bool) -> None:
    """Trained, so the fast path of inference is off; 4 heads on 8 ranks, too."""
    plan = checked(
        Torch().train(), torch.randn(2, 8, 16).double(), torch.randn(2, 12, 16).double(),
        tp=tp, sequence_parallel=sequence_parallel, hardware=TINY,
    )  # fmt: skip
    if tp in (2, 4):
        styles = {p.name: p.style for p in plan.parameters}
        assert styles["layer.self_attn.in_proj_weight"] == "column"
        assert styles["layer.self_attn.out_proj.weight"] == "row"
