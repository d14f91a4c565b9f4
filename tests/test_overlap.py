"""Collectives beside other work: the same numbers, hidden time, and what the report says of it."""

import copy
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama import assert_close, assert_trains_alike, gradients, llama, loss_for, pair, tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import tpcompile
from tpcompile import wire
from tpcompile.errors import InputError, TpcompileError
from tpcompile.pipelining import Lane, best_chunks
from tpcompile.torch_private import TorchDispatchMode


class Parallel(nn.Module):
    """Two branches of one input: the collectives of one can run beside the other."""

    def __init__(self, bias=False, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32, bias), nn.Linear(32, 16, bias)
        self.left, self.right = nn.Linear(16, 24, bias), nn.Linear(24, 16, bias)
        self.mix, self.dropout = nn.Linear(16, 16, bias), dropout

    def forward(self, x):
        """x: [b, s, 16] -> [b, s, 16]."""
        y = self.norm(x)
        first = torch.tanh(self.down(F.gelu(self.up(y))))
        second = torch.sin(self.right(F.silu(self.left(F.dropout(y, self.dropout)))))
        return x + self.mix(first) * second


class Twice(nn.Module):
    """Blocks, and linears that read what a norm reads too."""

    def __init__(self, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Parallel(bias) for _ in range(2))

    def forward(self, x):
        """x: [b, s, 16] -> [b, s, 16]."""
        for block in self.blocks:
            x = block(x)
        return x


def numbers(batch=2, length=8):
    """[batch, length, 16] in float64."""
    return torch.randn(batch, length, 16, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("chunks", [1, 2, 3, "auto"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [2, 3])
def test_numbers_are_those_of_one_device(chunks, sequence_parallel, tp):
    """Outputs, loss and all gradients, also where chunks do not divide and with biases."""
    x = numbers(2, 12)
    for model in (Twice().double(), Twice(bias=False).double()):
        options = {"sequence_parallel": sequence_parallel, "overlap_chunks": chunks}
        report = tpcompile.verify(model, (x,), tp=tp, **options)
        assert report.ok, report


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_chunks_of_a_llama(sequence_parallel):
    """Grouped-query attention and tied kv heads in two chunks on two ranks."""
    report = tpcompile.verify(
        llama(),
        {"input_ids": tokens()},
        tp=2,
        sequence_parallel=sequence_parallel,
        overlap_chunks=2,
    )
    assert report.ok, report


def check_training(sequence_parallel, chunks, frozen):
    """Three steps of AdamW from equal weights: outputs, gradients and parameters stay equal."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plain = llama()
    model = tpcompile.shard(
        copy.deepcopy(plain), mesh, {"input_ids": tokens()},
        sequence_parallel=sequence_parallel, overlap_chunks=chunks,
    )  # fmt: skip
    for each in (plain, model):
        each.model.embed_tokens.requires_grad_(not frozen)
        each.model.layers[0].self_attn.q_proj.requires_grad_(not frozen)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, model)]
    for step, shape in enumerate(((2, 8), (2, 8), (3, 10), (2, 7))):
        assert_trains_alike(plain, model, tokens(*shape, seed=step), tolerance=1e-10)
        for optimizer in optimizers:
            optimizer.step()
    full = tpcompile.full_state_dict(model)
    for name, value in plain.state_dict().items():
        assert_close(full[name], value, 1e-9)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_training_is_exact(ranks, sequence_parallel, chunks):
    """Several optimizer steps, sizes that chunks do and do not divide, frozen parameters too."""
    for frozen in (False, True):
        ranks(check_training, 2, sequence_parallel, chunks, frozen)
