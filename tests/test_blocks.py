"""Blocks stay modules: hooks, wrappers and checkpoints on them work on real ranks."""

import copy
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from llama import assert_close, assert_trains_alike, gradients, loss_for, pair, tokens
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.utils.checkpoint import checkpoint

from tpcompile.state import full_state_dict


class Checkpointed(nn.Module):
    """A user's own wrapper, which does not pass attributes on."""

    def __init__(self, block, use_reentrant):
        super().__init__()
        self.block, self.use_reentrant = block, use_reentrant

    def forward(self, *args, **kwargs):
        """Whatever the block takes."""
        return checkpoint(self.block, *args, use_reentrant=self.use_reentrant, **kwargs)


def wrap_by_torch(model):
    """What torchtitan does."""
    kind = type(model.model.layers[0])
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, kind))


def wrap_in_list(model, use_reentrant=False):
    """Replace the entries of the list of blocks."""
    for i, block in enumerate(model.model.layers):
        model.model.layers[i] = Checkpointed(block, use_reentrant)


def wrap_in_new_list(model):
    """Replace the list itself."""
    model.model.layers = nn.ModuleList(Checkpointed(b, False) for b in model.model.layers)


def patch_forward(model):
    """Replace the forward of each block."""
    for block in model.model.layers:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


SENT = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
}


def count_collectives(function):
    """Kind -> how many collectives the call starts, as torch's profiler sees them."""
    with torch.profiler.profile() as profile:
        function()
    return Counter(SENT[event.name] for event in profile.events() if event.name in SENT)


def check_checkpoint(wrap, sequence_parallel):
    """Exact gradients; the backward runs each block's forward collectives again."""
    plain, model = pair(sequence_parallel)
    counts = []
    for step in range(2):
        loss = loss_for(model, tokens())
        counts.append(count_collectives(loss.backward))
        if step == 0:
            wrap(model)
    assert_trains_alike(plain, model)
    assert_trains_alike(plain, model, tokens(3, 10))
    full = full_state_dict(model)
    wanted = plain.state_dict()
    assert len(full) == len(wanted)
    for value, other in zip(full.values(), wanted.values(), strict=True):
        assert torch.equal(value, other)
    return {kind: more for kind in counts[1] if (more := counts[1][kind] - counts[0][kind])}


REENTRANT = partial(wrap_in_list, use_reentrant=True)
WRAPS = [wrap_by_torch, wrap_in_list, REENTRANT, wrap_in_new_list, patch_forward]


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_checkpointed_blocks_run_again_in_the_backward(ranks, wrap, sequence_parallel):
    """Exact gradients, each block's forward collectives once more, and the same state dict.

    But a block's last one, which no backward needs: a checkpoint stops early, unless reentrant.
    """
    last = 4 if wrap is REENTRANT else 2
    halves = {"all_gather": 4, "reduce_scatter": last}
    again = halves if sequence_parallel else {"all_reduce": last}
    assert ranks(check_checkpoint, 2, wrap, sequence_parallel) == [again] * 2


def check_hooks():
    """What hooks see: each once a forward, in the order of the plain model, local outputs."""
    plain, model = pair()
    return [watch(plain), watch(model), assert_trains_alike(plain, model)][:2]


def watch(model):
    """What hooks on the model and its blocks will see: (where, what) each."""
    seen = []
    for i, block in enumerate(model.model.layers):
        note(block.register_forward_pre_hook, seen, f"pre {i}", lambda module, args: None)
        note(block.register_forward_hook, seen, f"post {i}", lambda m, args, out: out.detach())
        note(block.register_full_backward_hook, seen, f"backward {i}", lambda m, gi, go: go[0])
    by_name = partial(model.register_forward_pre_hook, with_kwargs=True)
    note(by_name, seen, "call", lambda module, args, kwargs: tuple(kwargs))
    note(model.register_forward_hook, seen, "return", lambda m, a, out: type(out).__name__)
    return seen


def note(register, seen, where, look):
    """Register a hook that adds what `look` makes of its arguments."""
    register(lambda *args: seen.append((where, look(*args))))


def test_hooks_fire_as_on_one_device(ranks):
    """On blocks and on the root: same order and, without sequence parallelism, same values."""
    for plain, sharded in ranks(check_hooks, 2):
        assert [name for name, _ in sharded] == [name for name, _ in plain]
        assert [name for name, _ in plain] == [
            *("call", "pre 0", "post 0", "pre 1", "post 1", "return", "backward 1", "backward 0")
        ]
        for (name, found), (_, wanted) in zip(sharded, plain, strict=True):
            if name.startswith(("post", "backward")):
                assert_close(found, wanted)
            else:
                assert found == wanted


def check_changing_hook():
    """A hook that replaces a block's output steers both models alike."""
    plain, model = pair()
    for each in (plain, model):
        each.model.layers[0].register_forward_hook(lambda m, a, out: out * 0.5)
    assert_trains_alike(plain, model)


def test_forward_hook_may_replace_the_output(ranks):
    """Its result goes on to the next block, and gradients pass it."""
    ranks(check_changing_hook, 2)


def check_clip_and_adamw(sequence_parallel):
    """Norms of the gradients and weights after steps are equal."""
    plain, model = pair(sequence_parallel)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model)]
    for step in range(3):
        assert_trains_alike(plain, model, tokens(seed=step))
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (plain, model)]
        assert_close(norms[1].full_tensor(), norms[0])
        assert norms[0] > 0.5, "nothing is clipped"
        for optimizer in optimizers:
            optimizer.step()
    assert_close(dict(full_state_dict(model)), dict(plain.state_dict()), tolerance=1e-9)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_clip_and_adamw(ranks, size, sequence_parallel):
    """`clip_grad_norm_` and AdamW act on the DTensor parameters as on the plain ones."""
    ranks(check_clip_and_adamw, size, sequence_parallel)


def check_copy():
    """A copy trains by itself; the first model is left alone."""
    plain, model = pair()
    copied, plain_copy = copy.deepcopy(model), copy.deepcopy(plain)
    with torch.no_grad():
        for each in (copied, plain_copy):
            for parameter in each.parameters():
                parameter.mul_(1.5)
    assert_trains_alike(plain_copy, copied)
    assert_trains_alike(plain_copy, copied, tokens(1, 5))
    assert_trains_alike(plain, model)
    assert_close(dict(full_state_dict(copied)), dict(plain_copy.state_dict()))
    assert all(g is not None for g in gradients(copied).values())
    return dist.get_rank()


def test_deepcopy_is_a_sharded_model_of_its_own(ranks):
    """What an average of the weights over steps needs."""
    assert ranks(check_copy, 2) == [0, 1]
