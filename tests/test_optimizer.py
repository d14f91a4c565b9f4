"""Optimizers made before sharding train the sharded model like the unsharded one."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from toy import Toy, layouts, mesh, pair

from tpcompile.errors import ShardingError
from tpcompile.optimizer import check_optimizer, remap_parameter
from tpcompile.parameters import shard_parameters, sharded_for
from tpcompile.state import full_state_dict
from tpcompile.stored import distribute


def check_training(make, steps_before):
    """Same weights after the same gradients, norms clipped alike; the padding stays zero."""
    plain, _ = pair()
    model = Toy()
    model.load_state_dict(plain.state_dict())
    optimizer, wanted = make(model), make(plain)
    tokens = torch.arange(12).reshape(3, 4) % 7
    for _ in range(steps_before):
        for each, its in ((plain, wanted), (model, optimizer)):
            its.zero_grad()
            each(tokens).backward()
            its.step()
    check_optimizer(optimizer)
    remap = partial(remap_parameter, optimizer)
    shard_parameters(model, layouts(dist.get_world_size()), mesh(), remap)
    by_name = sharded_for(model).layouts
    for _ in range(3):
        wanted.zero_grad()
        plain(tokens).backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            if q.grad is not None:
                p.grad = distribute(q.grad.clone(), by_name[name], mesh())
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        found = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.testing.assert_close(found.full_tensor(), norm)
        wanted.step()
        optimizer.step()
    full = full_state_dict(model)
    for name, q in plain.named_parameters():
        torch.testing.assert_close(full[name], q.detach(), atol=1e-6, rtol=1e-5)
    _check_remapped(model, optimizer, wanted, by_name)


def _check_remapped(model, optimizer, wanted, by_name):
    own = {id(p) for p in model.parameters()}
    assert all(id(p) in own for p in optimizer.state)
    for group, other in zip(optimizer.param_groups, wanted.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {
            k: v for k, v in other.items() if k != "params"
        }
        names = [n for p in group["params"] for n, q in model.named_parameters() if p is q]
        assert len(names) == len(other["params"])
        for p, q in zip(group["params"], other["params"], strict=True):
            assert p.requires_grad == q.requires_grad
    for name, p in model.named_parameters():
        if by_name[name].dim is not None:
            dim, real = by_name[name].dim, by_name[name].real_length(dist.get_rank())
            for each in (p, *optimizer.state.get(p, {}).values()):
                if isinstance(each, DTensor):
                    assert not each.to_local().tensor_split([real], dim)[1].any(), name


def sgd(model):
    """Momentum, weight decay, one group."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def adamw(model):
    """Two groups with their own options; not foreach."""
    groups = [[p for p in model.parameters() if (p.ndim < 2) == low] for low in (True, False)]
    options = [{"params": groups[0], "weight_decay": 0.0}, {"params": groups[1], "lr": 0.02}]
    return torch.optim.AdamW(options, lr=0.01)


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize(("size", "steps_before"), [(2, 2), (4, 0), (4, 2)])
def test_remapped_optimizer_trains_like_the_unsharded(ranks, make, size, steps_before):
    """Sharded before or after its first steps, with gradient clipping."""
    ranks(check_training, size, make, steps_before)


def test_factored_optimizer_state_is_refused():
    """State that is not of the parameter's shape cannot follow it."""
    parameter = nn.Parameter(torch.randn(4, 6))
    optimizer = torch.optim.Adafactor([parameter])
    parameter.sum().backward()
    check_optimizer(optimizer)
    optimizer.step()
    with pytest.raises(ShardingError) as error:
        check_optimizer(optimizer)
    assert str(error.value) == (
        "cannot shard the state of Adafactor.\n"
        "  its row_var has shape [4, 1] for a parameter of shape [4, 6].\n"
        "  fix: shard the model before the optimizer's first step."
    )
