"""State dicts of sharded models on real ranks are the unsharded model's."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from toy import Toy, assert_same, layouts, mesh, pair, save_full

from tpcompile.errors import CheckpointError
from tpcompile.parameters import local_parameter, shard_parameters, sharded_for
from tpcompile.state import full_state_dict, load_state_dict
from tpcompile.stored import distribute


def check_full_state_dict():
    """Gathered keys, bits and ties."""
    plain, model = pair()
    full = full_state_dict(model)
    assert_same(full, plain.state_dict())
    assert full._metadata == plain.state_dict()._metadata
    assert full["head.weight"] is full["embed.weight"]
    model.norm.running_mean.add_(1)
    assert torch.equal(full["norm.running_mean"], plain.norm.running_mean), "own memory"
    only = full_state_dict(model, rank0_only=True)
    assert list(only) == (list(full) if dist.get_rank() == 0 else [])


def check_parameters():
    """Names, aliases, attributes and shapes after shard_parameters."""
    plain, model = pair()
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.note == "kept"
    by_name = sharded_for(model).layouts
    assert by_name["embed.weight"] is by_name["head.weight"]
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor)
        assert isinstance(p, nn.Parameter)
        assert p.requires_grad == (name != "frozen")
        assert tuple(p.shape) == by_name[name].storage_shape()
        assert tuple(p.to_local().shape) == by_name[name].local_shape()
        local = local_parameter(p, by_name[name], dist.get_rank())
        if p.requires_grad:
            local.sum().backward()
            real = torch.ones(by_name[name].shape)
            assert torch.equal(by_name[name].from_storage(p.grad.full_tensor()), real)
            assert torch.equal(
                p.grad.to_local(), distribute(real, by_name[name], mesh()).to_local()
            )
    assert not any(isinstance(b, DTensor) for b in model.buffers())


def check_load(full):
    """All ways to load the original's state dict, and the model's own."""
    _, model = pair(seed=2)
    identity = {name: id(p) for name, p in model.named_parameters()}
    result = load_state_dict(model, full)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert model.restored == {"version": 3}
    assert_same(full_state_dict(model), full)
    for assign in (False, True):
        _, other = pair(seed=3)
        other.load_state_dict(full, assign=assign)
        assert_same(full_state_dict(other), full)
        assert other.head.weight is other.embed.weight
    _, other = pair(seed=4)
    other.load_state_dict(model.state_dict())
    assert_same(full_state_dict(other), full)
    assert {name: id(p) for name, p in model.named_parameters()} == identity


def check_meta(full):
    """Meta parameters stay meta, and take a state dict with assign=True."""
    with torch.device("meta"):
        model = Toy()
    shard_parameters(model, layouts(dist.get_world_size()), mesh())
    assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
    assert all(t.is_meta for t in full_state_dict(model).values() if isinstance(t, torch.Tensor))
    model.load_state_dict(full, assign=True)
    assert_same(full_state_dict(model), full)


def check_load_errors(full):
    """Texts of what does not fit; nothing is changed."""
    _, model = pair(seed=2)
    before, texts = full_state_dict(model), []
    wrong = dict(full, frozen=torch.zeros(8))
    missing = {key: value for key, value in full.items() if "qkv" not in key} | {"extra": 1}
    for state in (wrong, missing):
        with pytest.raises(CheckpointError) as error:
            load_state_dict(model, state)
        texts.append(str(error.value))
    with pytest.raises(RuntimeError, match=r"frozen: \[8\] in the state dict, \[6\] here"):
        model.load_state_dict({"frozen": torch.zeros(8)}, strict=False)
    assert_same(full_state_dict(model), before)
    load_state_dict(model, missing, strict=False)
    with pytest.raises(CheckpointError) as error:
        full_state_dict(model.qkv)
    return [*texts, str(error.value)]


def check_fsdp(full):
    """A state dict gathers from and loads into a model that FSDP2 has split once more."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(5)
    model = Toy()
    shard_parameters(model, layouts(2), grid["tp"])
    fully_shard(model, mesh=grid["dp"], ignored_params={model.scale})  # FSDP refuses scalars
    load_state_dict(model, full)
    assert_same(full_state_dict(model), full)


@pytest.mark.parametrize("size", [2, 4])
def test_parameters_become_dtensors_in_place(ranks, size):
    """Names, ties, attributes stay; local parts have the layout's shape; padding has no grad."""
    ranks(check_parameters, size)


@pytest.mark.parametrize("size", [2, 4])
def test_full_state_dict_is_the_originals(ranks, size):
    """Every layout gives the original bits back, on every rank or on rank 0 only."""
    ranks(check_full_state_dict, size)


@pytest.mark.parametrize(("save", "load"), [(2, 4), (4, 2), (2, 3)])
def test_state_saved_at_one_degree_loads_at_another(ranks, save, load):
    """load_state_dict, the module's own with and without assign, and meta parameters."""
    full = ranks(save_full, save)[0]
    ranks(check_load, load, full)
    ranks(check_meta, load, full)


def test_state_dicts_that_do_not_fit_are_refused_whole(ranks):
    """The error says what is wrong; the model keeps its weights."""
    full = ranks(save_full, 2)[0]
    texts = ranks(check_load_errors, 2, full)
    assert texts[0] == texts[1]
    assert texts[0] == [
        "cannot load frozen [6].\n"
        "  the state dict has [8] under this name.\n"
        "  fix: load the state dict of the unsharded model (full_state_dict gives it).",
        "cannot load the state dict into Toy.\n"
        "  missing: qkv.weight, qkv.bias; unexpected: extra.\n"
        "  fix: load a state dict of the same model, or pass strict=False.",
        "cannot treat Linear as a sharded model.\n"
        "  tpcompile has not sharded this object.\n"
        "  fix: pass the module that tpcompile.shard returned, not a part or a wrapper of it.",
    ]


def test_state_passes_through_fsdp(ranks):
    """On a (dp 2, tp 2) mesh."""
    full = ranks(save_full, 2)[0]
    ranks(check_fsdp, 4, full)
