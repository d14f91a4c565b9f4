"""torch.distributed.checkpoint on sharded models: saved at one degree, loaded at another."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toy import Toy, assert_same, layouts, pair

from tpcompile.errors import CheckpointError
from tpcompile.parameters import shard_parameters
from tpcompile.state import full_state_dict
from tpcompile.stored_tensor import Stored


def save(folder):
    """Save the toy; an asynchronous save next to it."""
    plain, model = pair()
    dcp.save(model.state_dict(), checkpoint_id=f"{folder}/sync")
    future = dcp.async_save(model.state_dict(), checkpoint_id=f"{folder}/async")
    future.result()
    return plain.state_dict()


def load(folder, wanted):
    """Load at this degree."""
    _, model = pair(seed=2)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    assert_same(full_state_dict(model), wanted)


def two_axes(seed):
    """The toy on (dp 2, tp 2)."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(seed)
    model = Toy()
    shard_parameters(model, layouts(2), grid["tp"])
    fully_shard(model, mesh=grid["dp"], ignored_params={model.scale})  # FSDP refuses scalars
    return model


def save_fsdp(folder):
    """Save with FSDP2 on a second axis."""
    model = two_axes(seed=5)
    dcp.save(model.state_dict(), checkpoint_id=folder)
    return full_state_dict(model)


def load_fsdp(folder, wanted):
    """Load with FSDP2 on a second axis."""
    model = two_axes(seed=6)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    assert_same(full_state_dict(model), wanted)


def check_values(folder):
    """What a state dict holds, and what can be done with it."""
    plain, model = pair()
    state, wanted = model.state_dict(), plain.state_dict()
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            assert value.shape == wanted[key].shape
    value = state["qkv.weight"]
    assert isinstance(value, Stored)
    same = [value, value.detach(), value.clone(), value.cpu(), copy.deepcopy(value)]
    torch.save(value, f"{folder}/{dist.get_rank()}.pt")
    for each in (*same, torch.load(f"{folder}/{dist.get_rank()}.pt")):
        assert isinstance(each, Stored)
        assert torch.equal(each.full_tensor(), wanted["qkv.weight"])
    with pytest.raises(CheckpointError) as error:
        value + 1
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for key, tensor in wanted.items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(full[key], tensor)
    _, other = pair(seed=3)
    set_model_state_dict(other, full, options=StateDictOptions(full_state_dict=True))
    assert_same(full_state_dict(other), wanted)
    with pytest.raises(CheckpointError):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(other, full, options=options)
    return str(error.value)


def test_state_dict_values_have_the_originals_shapes(ranks, tmp_path):
    """Copies stay in the class; full_tensor and torch's own full state dict give the original."""
    assert ranks(check_values, 2, tmp_path)[0] == (
        "cannot apply aten.add.Tensor to a tensor of a sharded model's state dict.\n"
        "  its storage is not in the original's order.\n"
        "  fix: call full_tensor() on it, or use the parameter of the model."
    )


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_checkpoint_moves_between_degrees(ranks, tmp_path, before, after):
    """Fused, product, padded and empty shares; synchronous and asynchronous saves."""
    wanted = ranks(save, before, tmp_path)[0]
    ranks(load, after, f"{tmp_path}/sync", wanted)
    ranks(load, after, f"{tmp_path}/async", wanted)


def test_checkpoint_moves_to_and_from_fsdp(ranks, tmp_path):
    """(dp 2, tp 2) to tp 2, and back."""
    wanted = ranks(save_fsdp, 4, f"{tmp_path}/grid")[0]
    ranks(load, 2, f"{tmp_path}/grid", wanted)
    ranks(load_fsdp, 4, f"{tmp_path}/grid", wanted)
    wanted = ranks(save, 2, tmp_path)[0]
    ranks(load_fsdp, 4, f"{tmp_path}/sync", wanted)
