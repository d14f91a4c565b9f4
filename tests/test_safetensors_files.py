"""Sharded models load from safetensors files, each rank its own slices."""

import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from toy import Toy, assert_same, layouts, mesh, pair, save_full

from tpcompile.errors import CheckpointError
from tpcompile.parameters import shard_parameters
from tpcompile.safetensors_files import load_safetensors
from tpcompile.state import full_state_dict


def check_safetensors(folder, full):
    """Into real parameters, and into parameters on meta (tied and requires_grad kept)."""
    _, model = pair(seed=2)
    assert load_safetensors(model, folder) == ["unknown"]
    wanted = {key: value for key, value in full.items() if isinstance(value, torch.Tensor)}
    found = full_state_dict(model)
    found.pop("_extra_state")
    assert_same(found, wanted)
    bare = Toy()
    for module in bare.modules():
        for attr, p in list(module.named_parameters(recurse=False)):
            if p is not bare.embed.weight:
                setattr(module, attr, nn.Parameter(p.to("meta"), p.requires_grad))
    bare.embed.weight = bare.head.weight = nn.Parameter(bare.embed.weight.to("meta"))
    shard_parameters(bare, layouts(dist.get_world_size()), mesh())
    assert all(p.is_meta for p in bare.parameters())
    load_safetensors(bare, folder)
    found = full_state_dict(bare)
    found.pop("_extra_state")
    assert_same(found, wanted)
    assert bare.head.weight is bare.embed.weight
    assert not bare.frozen.requires_grad


def check_safetensors_errors(folder, empty):
    """The texts of a checkpoint that misses a parameter, and of a folder without one."""
    torch.manual_seed(1)
    model = Toy()
    model.more = nn.Linear(2, 2)
    shard_parameters(model, {}, mesh())
    texts = []
    for path in (folder, empty):
        with pytest.raises(CheckpointError) as error:
            load_safetensors(model, path)
        texts.append(str(error.value).replace(str(empty), "FOLDER"))
    return texts


@pytest.mark.parametrize("size", [2, 4])
def test_safetensors_are_read_slice_by_slice(ranks, size, tmp_path):
    """A folder of two files, a tied name missing and an unknown one present."""
    full = ranks(save_full, 2)[0]
    tensors = {k: v for k, v in full.items() if isinstance(v, torch.Tensor) and k != "head.weight"}
    tensors["unknown"] = torch.zeros(1)
    names = list(tensors)
    parts = {"a.safetensors": names[:4], "b.safetensors": names[4:]}
    for file, keys in parts.items():
        save_file({key: tensors[key] for key in keys}, tmp_path / file)
    weight_map = {key: file for file, keys in parts.items() for key in keys}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    ranks(check_safetensors, size, tmp_path, full)


def test_safetensors_that_do_not_fit_are_refused(ranks, tmp_path):
    """Missing names, and no files at all."""
    full = ranks(save_full, 2)[0]
    tensors = {k: v for k, v in full.items() if isinstance(v, torch.Tensor) and k != "head.weight"}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "empty").mkdir()
    assert ranks(check_safetensors_errors, 2, tmp_path, tmp_path / "empty")[0] == [
        "cannot load the safetensors files into Toy.\n"
        "  missing: more.weight, more.bias.\n"
        "  fix: load the weights with from_pretrained first and shard the model then.",
        "cannot load safetensors from FOLDER.\n"
        "  it has neither model.safetensors nor model.safetensors.index.json.\n"
        "  fix: give the folder that save_pretrained wrote (safetensors, not .bin files).",
    ]
