"""Check that a model of your own gives the same on two ranks as on one, without starting ranks.

python examples/02_your_own_module.py
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpcompile


class Attention(nn.Module):
    """Causal self-attention with one fused qkv projection."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, s, hidden] -> [b, s, hidden]."""
        batch, length, hidden = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, hidden))


class Block(nn.Module):
    """Pre-norm: attention, then an MLP, each added to the residual stream."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, s, hidden] -> [b, s, hidden]."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A language model in plain torch; nothing in it knows about ranks."""

    def __init__(self, vocab: int, hidden: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        self.positions = nn.Embedding(length, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """ids, labels: [b, s] -> loss [], logits [b, s, vocab]."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Transformer(vocab=256, hidden=64, heads=4, layers=2, length=32)
    ids = torch.randint(256, (2, 32))
    labels = torch.randint(256, (2, 32))

    report = tpcompile.verify(model, {"ids": ids, "labels": labels}, tp=2)
    print(report)
    # To train it: model = tpcompile.shard(model, mesh, {"ids": ids, "labels": labels}) under
    # torchrun, with the optimizer and the loop as they were (see 01_quickstart.py).
    sys.exit(0 if report.ok else 1)
