"""A small model with a parameter of every kind of layout, and the same one sharded."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tpcompile.parameters import shard_parameters
from tpcompile.state import full_state_dict
from tpcompile.storage import ParamLayout


class Toy(nn.Module):
    """A tied embedding and a parameter of every kind of layout; buffers of both kinds."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.qkv = nn.Linear(8, 24)
        self.gate_up = nn.Linear(8, 16, bias=False)
        self.down = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.register_buffer("angles", torch.randn(3), persistent=False)

    def get_extra_state(self):
        """Anything picklable."""
        return {"version": 3}

    def set_extra_state(self, state):
        """Undo get_extra_state."""
        self.restored = state

    def forward(self, tokens):
        """A loss that every trainable parameter takes part in."""
        x = self.embed(tokens).flatten(0, 1)
        q, k, v = self.qkv(x).split([16, 4, 4], -1)
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        y = self.down(gate * up) * self.scale + q[:, :8] * k.sum(-1, True) + v.mean()
        return self.head(y).square().mean()


def layouts(size):
    """By the second name of the tied one, to see that any name works."""
    return {
        "head.weight": ParamLayout.sharded((7, 8), 0, ((1, 7, 1),), size),
        "qkv.weight": ParamLayout.sharded((24, 8), 0, ((1, 4, 4), (1, 1, 4), (1, 1, 4)), size),
        "qkv.bias": ParamLayout.sharded((24,), 0, ((1, 4, 4), (1, 1, 4), (1, 1, 4)), size),
        "gate_up.weight": ParamLayout.sharded((16, 8), 0, ((2, 8, 1),), size),
        "down.parametrizations.weight.original1": ParamLayout.sharded(
            (8, 8), 1, ((1, 8, 1),), size
        ),
        "frozen": ParamLayout.sharded((6,), 0, ((1, 3, 2),), size),
    }


def mesh():
    """All ranks as one axis."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def pair(seed=1):
    """(unsharded model, the same sharded)."""
    torch.manual_seed(seed)
    plain, model = Toy(), Toy()
    model.load_state_dict(plain.state_dict())
    model.embed.weight.note = "kept"
    shard_parameters(model, layouts(dist.get_world_size()), mesh())
    return plain, model


def assert_same(found, wanted):
    """Same keys in the same order, same bits, and nothing but plain CPU tensors."""
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert type(found[key]) is torch.Tensor
            assert torch.equal(found[key], value), key
            assert found[key].dtype == value.dtype
        else:
            assert found[key] == value


def save_full():
    """The full state dict of the sharded toy; runs on ranks."""
    return full_state_dict(pair()[1])
