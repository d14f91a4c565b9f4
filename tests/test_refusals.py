"""What a graph would silently leave out is refused, in one error, and nothing is changed."""

import copy
import functools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from plans import TINY
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import tpcompile
from tpcompile.errors import CaptureError, InputError, TpcompileError


class Mlp(nn.Module):
    """x + down(f(up(x))), in float64."""

    def __init__(self, function: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        self.function = function
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh())])
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, 8] -> [b, s, 8]."""
        return x + self.down(self.function(self.up(self.blocks[0](x))))


X = torch.randn(2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def verified(model: nn.Module) -> tpcompile.Report:
    """On two ranks, its weights split."""
    return tpcompile.verify(model, X, tp=2, hardware=TINY)


def hooked(h: Tensor) -> Tensor:
    """Scales a gradient by a hook."""
    h.register_hook(lambda grad: grad * 0.5)
    return h


def seeded(h: Tensor) -> Tensor:
    """The same noise every time."""
    torch.manual_seed(0)
    return h + torch.randn_like(h)


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (hooked, "the graph would not call this hook"),
        (seeded, "the graph would not set this seed"),
        (lambda h: h * random.random(), "its forward draws random numbers of Python or numpy"),
    ],
)
def test_dropped_by_tracing(function: Callable, found: str) -> None:
    """Hooks of tensors, seeds, numbers that Python draws."""
    with pytest.raises(CaptureError, match=found):
        verified(Mlp(function))


def test_backward_hooks_of_modules() -> None:
    """The whole text."""
    model = Mlp()
    model.down.register_full_backward_hook(lambda module, gi, go: None)
    with pytest.raises(CaptureError) as caught:
        verified(model)
    assert str(caught.value) == (
        "cannot capture Mlp.\n"
        "  down has a backward hook, which the graph would not call\n"
        "  fix: remove it, or register it on a repeated block after shard"
    )


class Scaled(torch.autograd.Function):
    """Its backward depends on how many elements there are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Round to quarters."""
        ctx.n = x.numel()
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        """Scaled by the size, as learned step sizes are."""
        return grad / math.sqrt(ctx.n)


def test_functions_that_read_a_shape() -> None:
    """They do not map elements to elements: on a rank the shape is another one."""
    with pytest.raises(CaptureError, match="Scaled"):
        verified(Mlp(Scaled.apply))


class Cached(Mlp):
    """Keeps a table per length in a dict, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, 8] -> [b, s, 8]."""
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        return super().forward(x) + self.tables[x.shape[1]]


def test_caches_are_left_as_they_were() -> None:
    """What a trace puts into a dict of the model is taken out again."""
    model = Cached()
    assert verified(model).ok
    assert model.tables == {}


def test_nothing_to_compute() -> None:
    """An empty batch."""
    assert tpcompile.verify(Mlp(), X[:0], tp=2, hardware=TINY).ok


def _own_forward(model: Mlp) -> None:
    model.forward = functools.partial(Mlp.forward, model)  # type: ignore[method-assign]


def _share(model: Mlp) -> None:
    model.down.weight.data = model.up.weight.data.t()


REFUSED = {
    "hook": (
        lambda model: model.blocks[0].register_forward_hook(lambda m, i, o: o * 1.5),
        "blocks.0 has forward hooks: they would be in the graph, and be called beside it",
    ),
    "own forward": (
        _own_forward,
        "this object has a forward of its own, which a sharded one would not run",
    ),
    "memory": (
        _share,
        "down.weight and up.weight share memory, but are two tensors; sharded, they would part",
    ),
}


def shard_each() -> None:
    """Called on every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for change, found in REFUSED.values():
        model = Mlp()
        change(model)
        before = dict(model.named_parameters())
        with pytest.raises(InputError) as caught:
            tpcompile.shard(model, mesh, X)
        assert caught.value.found == found
        assert dict(model.named_parameters()) == before


def test_refused_before_shard(ranks: Callable) -> None:
    """Hooks on blocks, a forward of the object's own, memory shared without a tie."""
    ranks(shard_each, 2)


def differentiate_twice() -> None:
    """Called on every rank: hooks of parameters are kept, gradients of gradients refused."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = Mlp()
    sharded = copy.deepcopy(model)
    for each in (model, sharded):
        each.up.weight.register_hook(lambda grad: grad * 0.5)
    tpcompile.shard(sharded, mesh, X.clone().requires_grad_(), hardware=TINY)
    for each in (model, sharded):
        each(X.clone().requires_grad_()).square().sum().backward()
    torch.testing.assert_close(sharded.up.weight.grad.full_tensor(), model.up.weight.grad)  # type: ignore
    x = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x)
    x = X.clone().requires_grad_()
    loss = sharded(x).square().sum()
    (mine,) = torch.autograd.grad(loss, x, retain_graph=True)
    torch.testing.assert_close(mine, grad)
    with pytest.raises(TpcompileError, match="only gradients of the first order"):
        torch.autograd.grad(loss, x, create_graph=True, retain_graph=True)
    with pytest.raises(TpcompileError, match="or batches of gradients"):
        torch.autograd.grad(loss, x, torch.ones(3, dtype=loss.dtype), is_grads_batched=True)


def test_higher_orders(ranks: Callable) -> None:
    """A penalty on a gradient would be summed once a rank; it is refused."""
    ranks(differentiate_twice, 2)


def checkpoint_new_kind() -> None:
    """Called on every rank: a checkpoint around the model, at sizes that need another graph."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = Mlp()
    sharded = copy.deepcopy(model)
    tpcompile.shard(sharded, mesh, X, hardware=TINY)
    x = X[:1, :1].clone()  # sizes of one are a kind of their own
    checkpoint(sharded, x, use_reentrant=False).square().sum().backward()
    model(x).square().sum().backward()
    for mine, theirs in zip(sharded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)  # type: ignore[union-attr]


def test_a_checkpoint_does_not_count_what_a_trace_saves(ranks: Callable) -> None:
    """The first call of a new kind traces inside of the checkpoint."""
    ranks(checkpoint_new_kind, 2)
