"""Collectives that reach the process group, from a profile of it, against Megatron's counts."""

from collections import Counter
from collections.abc import Callable

import models
import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import tpcompile

LAYERS = 2
KINDS = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::alltoall_base_": "all_to_all",
}
"""What torch's profiler calls an operation of a process group -> its kind."""


def counts(name: str, sequence_parallel: bool) -> tuple[Counter[str], Counter[str]]:
    """How often each kind ran in one forward and in one backward; called on every rank."""
    example = getattr(models, name)(layers=LAYERS)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = tpcompile.shard(
        example.model, mesh, example.inputs, sequence_parallel=sequence_parallel
    )
    with profile(activities=[ProfilerActivity.CPU]) as forward:
        loss = model(**example.inputs)["loss"]
    with profile(activities=[ProfilerActivity.CPU]) as backward:
        loss.backward()
    return _counted(forward), _counted(backward)


def _counted(run: profile) -> Counter[str]:
    found = Counter(event.name for event in run.events() or () if event.name.startswith("c10d::"))
    assert found.keys() <= KINDS.keys()
    return Counter({KINDS[name]: count for name, count in found.items()})


@pytest.mark.parametrize(
    ("name", "forward", "backward"), [("llama", 2, 2), ("gptj", 1, 1), ("neox", 1, 2)]
)
def test_tensor_parallel(ranks: Callable, name: str, forward: int, backward: int) -> None:
    """All-reduces only: two a dense block in each direction, none for q, k, v or up separately.

    A parallel residual needs one; in the backward pass only where both branches share a norm.
    Beside blocks: the embedding; two for the loss, over rows of numbers; the head's input, in the
    backward pass; and the logits, because the model returns them, are gathered.
    """
    for found in ranks(counts, 2, name, False):
        assert found == (
            {"all_reduce": LAYERS * forward + 1 + 2, "all_gather": 1},
            {"all_reduce": LAYERS * backward + 1},
        )


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sequence_parallel(ranks: Callable, name: str) -> None:
    """Two pairs of reduce-scatter and all-gather a block in each direction.

    And one all-reduce a block for the gradients of its norms, and one for those outside of blocks.
    The sum of the embeddings is scattered; the head's input and the logits are gathered.
    """
    pairs = 2 * LAYERS
    for found in ranks(counts, 2, name, True):
        assert found == (
            {"reduce_scatter": pairs + 1, "all_gather": pairs + 2, "all_reduce": 2},
            {"reduce_scatter": pairs + 1, "all_gather": pairs + 1, "all_reduce": LAYERS + 1},
        )
