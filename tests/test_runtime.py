"""Calls of a sharded model in other modes, structures and sizes than it was captured with."""

import pickle
import time
from datetime import timedelta

import pytest
import ranks as rank_pools
import torch
import torch.distributed as dist
from llama import (
    assert_close,
    assert_trains_alike,
    gradients,
    llama,
    loss_for,
    pair,
    tokens,
)
from torch.distributed.device_mesh import DeviceMesh

import tpcompile
from tpcompile import agreement
from tpcompile.errors import RankMismatchError, TpcompileError
from tpcompile.sharded_module import DISPATCHER


def variants(model):
    """How many captures the model holds."""
    return sum(map(len, model.__dict__[DISPATCHER].variants.values()))


def check_modes():
    """Eval, no_grad and inference_mode; a capture made in inference mode trains."""
    plain, model = pair()
    for each in (plain, model):
        each.eval()
    ids, mask = tokens(3, 6), torch.ones(3, 6, dtype=torch.long)
    mask[0, :2] = 0
    wanted = plain(input_ids=ids).logits
    with torch.no_grad():
        found = model(input_ids=ids).logits
    assert not found.requires_grad
    assert_close(found, wanted.detach())
    with torch.inference_mode():
        found = model(input_ids=ids).logits
        assert found.is_inference()
        assert_close(found, wanted.detach())
        made = tokens(3, 6) + 0
        found = model(input_ids=made, attention_mask=mask).logits
        assert_close(found, plain(input_ids=ids, attention_mask=mask).logits)
    assert_trains_alike(plain, model, ids, attention_mask=mask)
    assert variants(model) == 3, "training, eval, eval with a mask"
    for each in (plain, model):
        each.train()
    assert_trains_alike(plain, model, ids)
    assert variants(model) == 3


def test_modes(ranks):
    """Values are equal in every mode, and modes of autograd need no capture of their own."""
    ranks(check_modes, 2)


def check_autocast():
    """The capture under autocast is another one; without it the first one runs again."""
    plain, model = pair()
    for each in (plain, model):
        each.float()
    with torch.autocast("cpu", torch.bfloat16):
        logits = [m(input_ids=tokens()).logits for m in (plain, model)]
    assert logits[0].dtype == logits[1].dtype == torch.bfloat16
    torch.testing.assert_close(logits[1], logits[0], atol=2e-2, rtol=2e-2)
    for each in logits:
        each.float().square().sum().backward()
    wanted, found = gradients(plain), gradients(model)
    for name in wanted:
        assert (found[name] - wanted[name]).abs().max() <= 0.05 * wanted[name].abs().max(), name
    assert model(input_ids=tokens()).logits.dtype == torch.float32
    assert_trains_alike(plain, model, tolerance=1e-5)


def test_autocast_and_another_dtype(ranks):
    """`float()` of a sharded float64 model, and bfloat16 autocast around the call."""
    ranks(check_autocast, 2)


def check_accumulation():
    """Gradients of two micro batches add up, of two structures too."""
    plain, model = pair()
    for each in (plain, model):
        (loss_for(each, tokens(seed=1)) / 2).backward()
        mask = torch.ones(3, 5, dtype=torch.long)
        (loss_for(each, tokens(3, 5, seed=2), attention_mask=mask) / 2).backward()
    assert_close(gradients(model), gradients(plain))


def test_gradient_accumulation(ranks):
    """Over two micro batches before one step."""
    ranks(check_accumulation, 2)


def check_structures():
    """Labels and a mask by keyword, by position, left out again; a tuple as output."""
    plain, model = pair()
    ids = tokens()
    assert_trains_alike(plain, model)
    losses = [m(input_ids=ids, labels=ids).loss for m in (plain, model)]
    assert_close(losses[1], losses[0], 1e-5)
    mask = torch.ones_like(ids)
    losses = [m(ids, mask, labels=ids, return_dict=False) for m in (plain, model)]
    assert type(losses[1]) is tuple
    assert_close(losses[1], losses[0], 1e-5)
    before = variants(model)
    keyword = model(labels=ids, attention_mask=mask, input_ids=ids, return_dict=False)
    assert_close(keyword, losses[1])
    assert variants(model) == before, "how arguments are passed is no reason to capture"
    # one tensor for two arguments, and then two tensors: the order is that of the names
    other = tokens(seed=5)
    losses = [m(labels=other, input_ids=ids).loss for m in (plain, model)]
    assert_close(losses[1], losses[0], 1e-5)
    assert_trains_alike(plain, model)


def test_other_structures(ranks):
    """Each is captured once."""
    ranks(check_structures, 2)


def check_lengths(sequence_parallel):
    """Batches and lengths, divided by the degree or not, and of one token."""
    plain, model = pair(sequence_parallel)
    for shape in ((2, 8), (2, 7), (3, 6), (1, 9), (2, 7), (4, 12)):
        assert_trains_alike(plain, model, tokens(*shape))
    assert_close(model(tokens(2, 1)).logits, plain(tokens(2, 1)).logits)
    plans = model.__dict__[DISPATCHER].variants.values()
    return [len(found) for found in plans]


@pytest.mark.parametrize(("sequence_parallel", "captures"), [(False, [3]), (True, [4])])
def test_other_lengths(ranks, sequence_parallel, captures):
    """A length that the degree does not divide takes a plan without sequence parallelism.

    Captures: the first; one batch of 1 and one length of 1, as those sizes mean something else.
    """
    assert ranks(check_lengths, 2, sequence_parallel) == [captures] * 2


def check_freezing(sequence_parallel):
    """Some parameters frozen, then all, then none."""
    plain, model = pair(sequence_parallel)
    for each in (plain, model):
        each.requires_grad_(False)
        for name, parameter in each.named_parameters():
            parameter.requires_grad_("q_proj" in name or "norm" in name)
    assert_trains_alike(plain, model)
    for each in (plain, model):
        each.requires_grad_(False)
    logits = model(tokens()).logits
    assert not logits.requires_grad
    assert_close(logits, plain(tokens()).logits)
    for each in (plain, model):
        each.requires_grad_(True)
    assert_trains_alike(plain, model)
    return variants(model)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_freezing_and_thawing(ranks, sequence_parallel):
    """`requires_grad` may change after sharding; each set of trained parameters is one capture."""
    assert ranks(check_freezing, 2, sequence_parallel) == [3, 3]


def check_thawing():
    """Captured frozen, thawed later: the collectives of the backward must come in."""
    plain, model = llama(), llama()
    for each in (plain, model):
        each.requires_grad_(False)
        each.lm_head.requires_grad_(True)
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())), mesh_dim_names=("tp",))
    tpcompile.shard(model, mesh, {"input_ids": tokens()}, sequence_parallel=True)
    assert_trains_alike(plain, model)
    for each in (plain, model):
        each.requires_grad_(True)
    assert_trains_alike(plain, model)


def test_thawing_what_was_captured_frozen(ranks):
    """A plan without gradients has fewer collectives than training needs."""
    ranks(check_thawing, 2)


def check_refusals():
    """(pickling, a block alone): the errors' texts."""
    _, model = pair()
    texts = []
    for call in (lambda: pickle.dumps(model), lambda: model.model.layers[0](torch.ones(1, 2, 32))):
        with pytest.raises(TpcompileError) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_refusals(ranks):
    """A sharded model is not pickled, and its blocks do not run by themselves."""
    pickled, block = ranks(check_refusals, 2)[0]
    assert pickled == (
        "pickle a sharded LlamaForCausalLM\n"
        "  it holds process groups and one rank's part of the weights\n"
        "  fix: save tpcompile.full_state_dict(model), or model.state_dict() with "
        "torch.distributed.checkpoint"
    )
    assert block == (
        "LlamaDecoderLayer: a block of a sharded model was called by itself\n"
        "  its parameters are sharded, and only the whole model knows the plan\n"
        "  fix: call the model; tpcompile.full_state_dict gives weights for a single block"
    )


def check_mismatch(lengths, batches):
    """Ranks call with inputs of their own; the error's text, "" where there is none."""
    group = dist.new_group([0, 1])  # its store holds no earlier meeting
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    _, model = pair(True, mesh)
    agreement.PATIENCE = timedelta(seconds=3)
    rank = dist.get_rank()
    try:
        model(tokens(batches[rank], lengths[rank]))
    except RankMismatchError as error:
        time.sleep(1)
        return str(error)
    return ""


def test_ranks_with_different_new_inputs():
    """Both need a new graph, for different lengths: both say so at once."""
    texts = rank_pools.run_on_ranks(check_mismatch, 2, (7, 9), (1, 1))
    assert texts[0] == (
        "call LlamaForCausalLM with inputs of a new kind on all ranks of the axis\n"
        "  rank 0 has input_ids int64[1, 7], rank 1 has input_ids int64[1, 9]\n"
        "  fix: give all ranks of the axis inputs of the same structure and sizes at each step"
    )
    assert "rank 1 has input_ids int64[1, 9], rank 0 has input_ids int64[1, 7]" in texts[1]


def test_one_rank_needs_a_new_graph():
    """The other runs on and waits in a collective; the first one says so instead of hanging."""
    try:
        with pytest.raises(rank_pools.RankFailure) as caught:
            rank_pools.run_on_ranks(check_mismatch_raising, 2)
        assert "rank 0 has input_ids int64[1, 7]; rank 1 did not come in 0:00:03" in str(
            caught.value
        )
    finally:
        rank_pools.close_pools()


def check_mismatch_raising():
    """Raise what `check_mismatch` caught, so that the pool ends the rank that waits."""
    text = check_mismatch((7, 8), (1, 2))
    if text:
        raise RuntimeError(text)
