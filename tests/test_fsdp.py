"""FSDP2 on the blocks and the root of a sharded model, on a second mesh axis."""

import pytest
import torch
from llama import VOCAB, assert_close, loss_for, pair
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tpcompile.state import full_state_dict, load_state_dict


def train(sequence_parallel, reshard):
    """(plain, sharded) after steps on a (dp 2, tp 2) mesh; plain averages over both batches."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, model = pair(sequence_parallel, mesh)
    batches = torch.randint(0, VOCAB, (2, 2, 8), generator=torch.Generator().manual_seed(3))
    mine = batches[mesh["dp"].get_local_rank()]
    for block in model.model.layers:
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh["dp"], reshard_after_forward=reshard)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_for(model, mine).backward()
        (sum(loss_for(plain, batch) for batch in batches) / 2).backward()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (plain, model)]
        assert_close(norms[1].full_tensor(), norms[0])
        for optimizer in optimizers:
            optimizer.step()
    return plain, model


def check_training(sequence_parallel, reshard):
    """Equal weights after the steps, whole on every rank; each parameter on both axes."""
    plain, model = train(sequence_parallel, reshard)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert parameter.device_mesh.mesh_dim_names == ("dp", "tp"), name
    full = full_state_dict(model)
    wanted = plain.state_dict()
    assert list(full) == list(wanted)
    assert_close(dict(full), dict(wanted), tolerance=1e-9)
    zeros = {name: torch.zeros_like(value) for name, value in full.items()}
    load_state_dict(model, zeros)
    load_state_dict(model, full)
    again = full_state_dict(model)
    assert all(torch.equal(again[name], full[name]) for name in full)


@pytest.mark.parametrize(
    ("sequence_parallel", "reshard"),
    [pytest.param(False, True, marks=pytest.mark.slow), (True, False)],
)
def test_fully_shard_trains_like_one_device(ranks, sequence_parallel, reshard):
    """Blocks and root under `fully_shard` on the dp axis, each dp rank with its own batch."""
    ranks(check_training, 4, sequence_parallel, reshard)
