"""torch.distributed.checkpoint on sharded models: saved at one degree, loaded at another."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from toy import Toy, assert_same, layouts, pair

from tpcompile.errors import CheckpointError
from tpcompile.optimizer import hook_optimizer, watch_optimizers
from tpcompile.parameters import shard_parameters, sharded_for
from tpcompile.state import full_state_dict
from tpcompile.storage import ParamLayout
from tpcompile.stored import distribute, gather_full
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
        value.add(1)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for key, tensor in wanted.items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(full[key], tensor)
    _, other = pair(seed=3)
    set_model_state_dict(other, dict(full), options=StateDictOptions(full_state_dict=True))
    assert_same(full_state_dict(other), wanted)
    return str(error.value)


def check_broadcast():
    """The broadcast of torch from rank 0 writes even chunks of the original into the parameters."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 7))
    full = {key: torch.randn_like(value) for key, value in model.state_dict().items()}
    fused = {
        "0.weight": ParamLayout.sharded((24, 8), 0, ((1, 4, 4), (2, 2, 2)), 2),
        "0.bias": ParamLayout.sharded((24,), 0, ((1, 4, 4), (2, 2, 2)), 2),
    }
    shard_parameters(model, fused, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    given = full if dist.get_rank() == 0 else {}
    set_model_state_dict(model, dict(given), options=options)
    assert_same(full_state_dict(model), full)


def trained(seed, steps):
    """The toy with an optimizer made after sharding, its gradients the same at every degree."""
    watch_optimizers()
    plain, model = pair(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    by_name = sharded_for(model).layouts
    for _ in range(steps):
        plain.zero_grad()
        plain(torch.arange(12).reshape(3, 4) % 7).backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            if q.grad is not None:
                p.grad = distribute(q.grad, by_name[name], p.device_mesh)
        optimizer.step()
    return model, optimizer


def moments(model, optimizer):
    """Original first moments by name."""
    by_name = sharded_for(model).layouts
    return {
        name: gather_full(optimizer.state[p]["exp_avg"], by_name[name])
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def save_optimizer(folder):
    """Two steps, then save."""
    model, optimizer = trained(seed=1, steps=2)
    state, parts = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": parts}, checkpoint_id=folder)
    whole = pytree.tree_map_only(DTensor, lambda t: t.full_tensor(), optimizer.state_dict())
    return moments(model, optimizer), whole


def load_optimizer(folder, wanted, whole):
    """From the checkpoint, and from a plain state dict."""
    model, optimizer = trained(seed=2, steps=1)
    state, parts = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optimizer": parts}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=parts)
    assert_same(moments(model, optimizer), wanted)
    model, optimizer = trained(seed=3, steps=0)
    hook_optimizer(optimizer)
    optimizer.load_state_dict(whole)
    assert_same(moments(model, optimizer), wanted)


def test_state_dict_values_have_the_originals_shapes(ranks, tmp_path):
    """Copies stay in the class; full_tensor and torch's own full state dict give the original."""
    assert ranks(check_values, 2, tmp_path)[0] == (
        "cannot apply aten.add.Tensor to a tensor of a sharded model's state dict.\n"
        "  its storage is not in the original's order.\n"
        "  fix: call full_tensor() on it, or use the parameter of the model."
    )


def test_broadcast_from_rank_0_loads_the_original(ranks):
    """A fused weight, whose storage has the original's shape in another order."""
    ranks(check_broadcast, 2)


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


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_optimizer_state_moves_between_degrees(ranks, tmp_path, before, after):
    """get_state_dict and set_state_dict of an optimizer made after sharding; whole state too."""
    wanted, whole = ranks(save_optimizer, before, tmp_path)[0]
    ranks(load_optimizer, after, tmp_path, wanted, whole)
