"""A layer as Korthikanti et al. (2022) count it, and what autograd really keeps of a model."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tpcompile import pipeline
from tpcompile.capture_inputs import bind_inputs
from tpcompile.clone import clone
from tpcompile.local_group import run_ranks
from tpcompile.program import Program


class GPTLayer(nn.Module):
    """Attention by its formula and an MLP of 4 times the width, in Megatron's order [s, b, h]."""

    def __init__(self, hidden: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.dim = heads, hidden // heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.drop = nn.Dropout(dropout)

    def by_head(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [b*heads, s, dim], a view."""
        return x.view(x.shape[0], x.shape[1] * self.heads, self.dim).transpose(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        x = x.transpose(0, 1).contiguous()
        y = self.norm1(x)
        q, k, v = self.by_head(self.q(y)), self.by_head(self.k(y)), self.by_head(self.v(y))
        scores = torch.bmm(q, k.transpose(1, 2)) * (1 / math.sqrt(self.dim))
        context = torch.bmm(self.drop(F.softmax(scores, -1)), v)
        x = x + self.drop(self.o(context.transpose(0, 1).reshape(x.shape)))
        y = self.norm2(x)
        return (x + self.drop(self.down(F.gelu(self.up(y))))).transpose(0, 1)


def kept_bytes(program: Program, model: nn.Module, size: int, inputs: dict[str, Any]) -> int:
    """Bytes that autograd keeps on rank 0 when the planned program runs: each storage once."""
    tensors, _, _ = bind_inputs(model, (), inputs)

    def on_rank(axis: tuple[str, int, int]) -> int:
        local = clone(program)
        pipeline.local(local, axis)
        values, resident = _values(local, model, tensors, axis[2])
        kept: dict[int, Tensor] = {}

        def pack(t: Tensor) -> Tensor:
            kept[t.untyped_storage().data_ptr()] = t
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            outputs = fx.GraphModule(nn.Module(), local.graph)(*values)
        assert outputs
        return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in resident)

    return run_ranks(size, on_rank)[0]


def _values(
    local: Program, model: nn.Module, tensors: list[Tensor], rank: int
) -> tuple[list[Tensor | None], set[int]]:
    """What the placeholders stand for on a rank, and the storages that live anyway."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    values: list[Tensor | None] = []
    resident: set[int] = set()
    given = iter(tensors)
    for node in local.placeholders():
        leaf = local.leaves[node.name]
        if leaf.kind == "parameter":
            part = local.extra["layouts"][leaf.name].to_local(parameters[leaf.name].detach(), rank)
            values.append(part.requires_grad_())
        elif leaf.kind == "buffer":
            values.append(buffers[leaf.name].clone())
        else:
            values.append(leaf.tensor if leaf.kind == "constant" else next(given))
        value = values[-1]
        if leaf.kind != "input" and value is not None:
            resident.add(value.untyped_storage().data_ptr())
    return values, resident
