"""Models made of a list of steps, for random tests: every list is a valid model."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from models import scrambled, token_ids
from torch import Tensor, nn

HEADS = (1, 2, 3, 4, 5, 6)
WIDTHS = (3, 4, 6, 8, 10, 12)
KINDS = (
    "linear", "linear", "linear", "bias", "act", "norm", "rms", "add", "add", "gate", "heads",
    "attend", "attend", "mix", "halves", "concat", "again", "mean", "slice", "scale", "flat",
    "softmax", "expand",
)  # fmt: skip


class Step(NamedTuple):
    """One op on values that there are: `a` and `b` pick them, `n` picks a size."""

    kind: str
    a: int
    b: int
    n: int


class Chain(nn.Module):
    """Applies steps one after the other to values [b, s, width of its own]."""

    def __init__(self, steps: list[Step], vocab: int) -> None:
        super().__init__()
        self.steps = steps
        self.embed = nn.Embedding(vocab, 6)
        self.parts = nn.ModuleList()
        self.gains = nn.ParameterList()
        self.widths = [6]
        self.order: list[tuple[Step, int, int, list[int]]] = []
        for step in steps:
            self._prepare(step)
        self.head = nn.Linear(self.widths[-1], vocab, bias=bool(len(steps) % 2))

    def _linear(self, inner: int, outer: int, bias: bool = True) -> int:
        self.parts.append(nn.Linear(inner, outer, bias=bias))
        return len(self.parts) - 1

    def _prepare(self, step: Step) -> None:
        """Make the step's modules and note the width of its result."""
        a = step.a % len(self.widths)
        width = self.widths[a]
        same = [i for i, w in enumerate(self.widths) if w == width]
        b = same[step.b % len(same)]
        new, made = width, []
        if step.kind in ("linear", "bias"):
            new = WIDTHS[step.n % len(WIDTHS)]
            made = [self._linear(width, new, step.kind == "bias")]
        elif step.kind in ("norm", "rms"):
            self.parts.append((nn.LayerNorm if step.kind == "norm" else nn.RMSNorm)(width))
            made = [len(self.parts) - 1]
        elif step.kind in ("attend", "heads"):
            heads = HEADS[step.n % len(HEADS)]
            inner = heads * (2 + step.b % 2)
            count = 3 if step.kind == "attend" else 1
            made = [self._linear(width, inner, bool(step.b % 2)) for _ in range(count)]
            made.append(self._linear(inner, width))
        elif step.kind == "halves":
            made = [self._linear(width, 2 * width, False)]
        elif step.kind == "concat":
            b = step.b % len(self.widths)
            made = [self._linear(width + self.widths[b], width)]
        elif step.kind == "slice":
            new = max(1, width // 2)
        elif step.kind == "scale":
            self.gains.append(nn.Parameter(torch.ones(width)))
            made = [len(self.gains) - 1]
        self.order.append((step, a, b, made))
        self.widths.append(new)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss, the logits, and the last value."""
        values = [self.embed(ids)]
        for step, a, b, made in self.order:
            values.append(self._run(step, values, a, b, made))
        logits = self.head(values[-1])
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits, "last": values[-1]}

    def _run(self, step: Step, values: list[Tensor], a: int, b: int, made: list[int]) -> Tensor:
        x, y = values[a], values[b]
        parts = [self.parts[i] for i in made] if step.kind != "scale" else []
        if step.kind in ("linear", "bias", "norm", "rms"):
            return parts[0](x)
        if step.kind == "attend":
            heads = HEADS[step.n % len(HEADS)]
            q, k, v = (p(x).unflatten(-1, (heads, -1)).transpose(1, 2) for p in parts[:3])
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=bool(step.a % 2))
            return parts[3](attended.transpose(1, 2).flatten(2))
        if step.kind == "heads":
            heads = HEADS[step.n % len(HEADS)]
            grid = parts[0](x).view(*x.shape[:2], heads, -1)
            return parts[1]((grid * grid.softmax(-1)).reshape(*x.shape[:2], -1))
        if step.kind == "halves":
            gate, up = parts[0](x).chunk(2, -1)
            return F.silu(gate) * up
        if step.kind == "concat":
            return parts[0](torch.cat([x, y], -1))
        if step.kind == "scale":
            return x * self.gains[made[0]]
        return self._without_parameters(step, x, y)

    def _without_parameters(self, step: Step, x: Tensor, y: Tensor) -> Tensor:
        if step.kind == "add":
            return x + y
        if step.kind == "gate":
            return x * torch.sigmoid(y)
        if step.kind == "act":
            return (F.gelu, F.relu, torch.tanh)[step.n % 3](x)
        if step.kind == "mix":
            return (x @ y.mT).softmax(-1) @ y
        if step.kind == "mean":
            return x - x.mean((1, 2)[step.n % 2], keepdim=True)
        if step.kind == "slice":
            return x[..., : max(1, x.shape[-1] // 2)]
        if step.kind == "flat":
            return (x.reshape(-1, x.shape[-1]) * 0.5).view_as(y)
        if step.kind == "softmax":
            return x.softmax((1, 2)[step.n % 2])
        if step.kind == "expand":
            return y[:, :1].expand_as(x) + x
        assert step.kind == "again", step.kind
        fitting = [
            p
            for p in self.parts
            if isinstance(p, nn.Linear) and p.in_features == p.out_features == x.shape[-1]
        ]
        return fitting[step.n % len(fitting)](x) if fitting else -x


def chain(steps: list[Step], vocab: int = 12, seq: int = 6) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model of some steps in float64, and inputs for it."""
    torch.manual_seed(0)
    ids = token_ids(2, seq, vocab)
    return scrambled(Chain(steps, vocab)), {"ids": ids, "labels": ids.flip(1)}
