"""Collectives that reach the process group, from a profile of it, against Megatron's counts."""

from collections import Counter
from collections.abc import Callable

import models
import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import tpcompile

KINDS = {
    "c10d::allreduce_": "all_reduce",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::alltoall_base_": "all_to_all",
}
"""What torch's profiler calls an operation of a process group -> its kind."""
ELEMENTS = 2 * 8 * 32
"""Of the residual stream: batch, sequence, width of every model here."""


def counts(name: str, layers: int, sequence_parallel: bool) -> list[dict[tuple[str, bool], int]]:
    """How often each kind ran in forward and in backward; called on every rank.

    A kind is counted apart where the operation is smaller than the residual stream's share.
    """
    example = getattr(models, name)(layers=layers)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = tpcompile.shard(
        example.model, mesh, example.inputs, sequence_parallel=sequence_parallel
    )
    found = []
    with _profile() as forward:
        loss = model(**example.inputs)["loss"]
    with _profile() as backward:
        loss.backward()
    for run in (forward, backward):
        found.append(Counter(_kinds(run)))
    return found


def _profile() -> profile:
    return profile(activities=[ProfilerActivity.CPU], record_shapes=True)


def _kinds(run: profile) -> list[str]:
    events = run.events()
    assert events is not None
    unknown = {e.name for e in events if e.name.startswith("c10d::")} - KINDS.keys()
    assert not unknown
    return [KINDS[e.name] for e in events if e.name in KINDS]


def per_block_and_rest(
    ranks: Callable, name: str, sequence_parallel: bool
) -> tuple[list[Counter[str]], list[Counter[str]]]:
    """[forward, backward] counts of one more block, and of a model without blocks."""
    one = ranks(counts, 2, name, 1, sequence_parallel)
    two = ranks(counts, 2, name, 2, sequence_parallel)
    assert one[0] == one[1]
    assert two[0] == two[1]
    block, rest = [], []
    for a, b in zip(one[0], two[0], strict=True):
        block.append(b - a)
        rest.append(a - (b - a))
        assert rest[-1] + block[-1] == a
    return block, rest
