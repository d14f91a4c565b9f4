"""`partial=True`: blocks are sharded one by one where the model around them cannot be captured."""

import copy
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from plans import TINY
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import tpcompile
from tpcompile.errors import CaptureError


class Early(nn.Module):
    """Stops at a block when what is left changes little: no trace can know which."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(models.Block(16, 4, 2, 24, 0.0) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("runs", torch.zeros((), dtype=torch.long))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        """[b, s] -> logits [b, s, 32] and a loss."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
            if x.abs().max().item() < 1e-3:
                break
        self.runs += 1
        logits = self.head(self.norm(x))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        return {"loss": loss, "logits": logits}


def early() -> tuple[nn.Module, Tensor]:
    """The model in float64 and ids."""
    torch.manual_seed(0)
    return models.scrambled(Early()), models.token_ids(2, 8, 32)


def train(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """Outputs of three steps with clipped gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for _ in range(3):
        output = model(ids)
        output["loss"].backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found += [*output.values(), norm.full_tensor() if isinstance(norm, DTensor) else norm]
    return found


def train_both(sequence_parallel: bool) -> tuple[str, int]:
    """The plan's text and how many parameters are split; called on every rank."""
    model, ids = early()
    sharded = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    options = {"sequence_parallel": sequence_parallel, "hardware": TINY}
    assert tpcompile.shard(sharded, mesh, ids, partial=True, **options) is sharded
    assert sharded.runs.item() == 0
    twice = copy.deepcopy(sharded)
    wanted = train(model, ids)
    for each in (sharded, twice):
        torch.testing.assert_close(train(each, ids), wanted, rtol=1e-9, atol=1e-9)
        full = tpcompile.full_state_dict(each)
        torch.testing.assert_close(dict(full), model.state_dict(), rtol=1e-9, atol=1e-9)
    plan: tpcompile.Plan = sharded.plan  # type: ignore[assignment]
    assert [p.name for p in plan.parameters] == [n for n, _ in model.named_parameters()]
    assert str(sharded.blocks[1].explain()).startswith("2 ranks of tiny")  # type: ignore
    assert sum(c.forward != "" for c in plan.collectives) >= 3 * 2
    split = [p for p in sharded.parameters() if p.placements[0].is_shard()]  # type: ignore
    return str(plan), len(split)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_blocks_are_sharded(ranks: Callable, sequence_parallel: bool) -> None:
    """Three AdamW steps, a deep copy and the state dict are those of one device."""
    for text, split in ranks(train_both, 2, sequence_parallel):
        assert split >= 3 * 4
        assert "captured block by block: " in text


def shard_nothing() -> str:
    """The error where no block can be captured; the model is unchanged."""
    model, ids = early()
    for block in model.blocks:  # type: ignore[union-attr]
        block.forward = lambda x: x if x.sum().item() > 0 else -x
    before = type(model), dict(model.named_parameters())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    with pytest.raises(CaptureError) as caught:
        tpcompile.shard(model, mesh, ids, partial=True)
    assert (type(model), dict(model.named_parameters())) == before
    return str(caught.value)


def test_nothing_can_be_captured(ranks: Callable) -> None:
    """One error on every rank, which says why for each block."""
    for text in ranks(shard_nothing, 2):
        head, found, fix = text.split("\n  ")
        assert head == "shard Early block by block, as partial=True allows"
        assert found.count("is replicated but for modules in it: ") == 3
        assert (
            fix == "fix: keep blocks in an nn.ModuleList, and what cannot be traced outside of them"
        )


class Hit(nn.Module):
    """Attention-like mixing that can be captured, beside a loop over experts that tokens chose."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.router = nn.Linear(16, 3)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, 16] -> [b, s, 16]."""
        x = x + self.mlp(x)
        chosen = self.router(x).argmax(-1)
        y = torch.zeros_like(x)
        for e in chosen.unique().tolist():
            y = y + self.experts[e](x) * (chosen == e)[..., None]
        return x + y


class Hits(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Hit() for _ in range(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """[b, s, 16] -> a loss."""
        for block in self.blocks:
            x = block(x)
        return {"loss": x.square().mean()}


def train_hits() -> list[str]:
    """The styles of the first block's MLP; called on every rank."""
    torch.manual_seed(0)
    model, x = models.scrambled(Hits()), torch.randn(2, 8, 16, dtype=torch.float64)
    sharded = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    tpcompile.shard(sharded, mesh, x, partial=True, hardware=TINY, sequence_parallel=False)
    for each in (model, sharded):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(3):
            each(x)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    full = tpcompile.full_state_dict(sharded)
    torch.testing.assert_close(dict(full), model.state_dict(), rtol=1e-9, atol=1e-9)
    plan: tpcompile.Plan = sharded.plan  # type: ignore[assignment]
    return [p.style for p in plan.parameters if p.name.startswith("blocks.0.mlp")][::2]


def test_modules_inside_of_blocks(ranks: Callable) -> None:
    """Where a block cannot be captured, what can be in it is."""
    assert ranks(train_hits, 2) == [["column", "row"]] * 2
