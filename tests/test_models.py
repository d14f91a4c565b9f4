"""Whole models on real ranks in float64: all that they give is what one device gives."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from models import MODELS, Example, plain, token_ids
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import tpcompile

EXACT, SINGLE = 1e-10, 2e-5
"""Largest difference over the largest element; where something is computed in float32."""


def mesh() -> DeviceMesh:
    """All ranks as the axis tp."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def tensors_of(output: Any) -> list[Tensor]:
    """All tensors of an output, in order."""
    return [leaf for leaf in pytree.tree_leaves(dict(output)) if isinstance(leaf, Tensor)]


def trained(model: nn.Module, inputs: dict[str, Any], steps: int = 3) -> list[Tensor]:
    """The outputs of each of some SGD steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for _ in range(steps):
        output = model(**inputs)
        output["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        found += tensors_of(output)
    return found


def assert_close(found: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    """Same shapes and dtypes, and differences within the tolerance of the largest element."""
    for a, b in zip(found, wanted, strict=True):
        size = tolerance * max(1e-3, float(b.detach().abs().max()))
        torch.testing.assert_close(a, b, rtol=0, atol=size)


def assert_trains_alike(example: Example, sequence_parallel: bool | str) -> nn.Module:
    """Three SGD steps of a sharded copy and of the model are the same; gives the copy."""
    model = copy.deepcopy(example.model)
    tpcompile.shard(model, mesh(), example.inputs, sequence_parallel=sequence_parallel)
    tolerance = SINGLE if example.single else EXACT
    wanted = trained(example.model, example.inputs)
    assert_close(trained(model, example.inputs), wanted, tolerance)
    state = example.model.state_dict()
    full = tpcompile.full_state_dict(model)
    assert list(full) == list(state)
    assert_close(list(full.values()), list(state.values()), tolerance)
    return model


def train_model(name: str, sequence_parallel: bool, config: dict[str, Any]) -> int:
    """How many parameters are sharded; called on every rank."""
    model = assert_trains_alike(getattr(models, name)(**config), sequence_parallel)
    split = [p for p in model.parameters() if isinstance(p, DTensor) and p.placements[0].is_shard()]
    return len(split)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks(ranks: Callable, name: str, sequence_parallel: bool) -> None:
    """Outputs and losses of three steps, and all weights after them; something is sharded."""
    assert all(ranks(train_model, 2, name, sequence_parallel, {}))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["plain", "gpt2", "llama"])
def test_four_ranks(ranks: Callable, name: str, sequence_parallel: bool) -> None:
    """As on two, with fewer kv heads than ranks in two of the models."""
    assert all(ranks(train_model, 4, name, sequence_parallel, {}))


@pytest.mark.parametrize(
    ("size", "config"),
    [
        (2, {"heads": 3, "kv_heads": 3, "width": 24, "ffn": 49, "vocab": 47}),
        (2, {"heads": 4, "kv_heads": 1, "tied": True, "seq": 7}),
        (4, {"heads": 5, "kv_heads": 5, "width": 40, "ffn": 30, "vocab": 50, "tied": True}),
        (4, {"heads": 6, "kv_heads": 3, "width": 24, "ffn": 7, "vocab": 49, "seq": 6}),
    ],
)
def test_sizes_that_do_not_divide(ranks: Callable, size: int, config: dict[str, Any]) -> None:
    """Heads, kv heads, ffn, vocabulary and sequence of any size on any degree."""
    assert all(ranks(train_model, size, "plain", "auto", config))


@pytest.mark.parametrize("name", MODELS)
def test_three_ranks_verified(name: str) -> None:
    """Outputs, loss and every gradient on three ranks in this process."""
    example = MODELS[name]()
    before = {n: p.clone() for n, p in example.model.named_parameters()}
    report = tpcompile.verify(example.model, example.inputs, tp=3)
    assert report.ok, report
    for n, p in example.model.named_parameters():
        assert p.grad is None
        assert torch.equal(p, before[n])


def test_dropout_verified() -> None:
    """A split dropout drops what one device drops, in whatever order ranks get there."""
    example = plain(train=True, dropout=0.4)
    for sequence_parallel in (False, True):
        report = tpcompile.verify(
            example.model, example.inputs, tp=2, sequence_parallel=sequence_parallel
        )
        assert report.ok, report


class _Captures:
    """Counts what torch exports while it is entered."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> "_Captures":
        self._export = torch.export.export
        torch.export.export = self._counted  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        torch.export.export = self._export

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self._export(*args, **kwargs)


def call_otherwise(sequence_parallel: bool) -> list[int]:
    """Captures made by calls of other sizes, structures and modes; called on every rank."""
    example = plain()
    model = copy.deepcopy(example.model)
    tpcompile.shard(model, mesh(), example.inputs, sequence_parallel=sequence_parallel)
    made = []

    def compare(**inputs: Tensor) -> None:
        with _Captures() as captures:
            found = model(**inputs)
        wanted = example.model(**inputs)
        assert list(found) == list(wanted)
        assert_close(list(found.values()), list(wanted.values()), EXACT)
        made.append(captures.count)

    for batch, seq in ((2, 8), (4, 8), (3, 12), (2, 7), (3, 5)):
        ids = token_ids(batch, seq)
        compare(ids=ids, labels=ids)
    for _ in range(2):
        compare(ids=token_ids(3, 6))
    for part in (model, example.model):
        part.train()
    for _ in range(2):
        compare(ids=ids, labels=ids)
    assert model.calls == 2
    for part in (model, example.model):
        part.eval()
    compare(ids=ids, labels=ids)
    assert model.calls == 2
    return made


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_other_calls(ranks: Callable, sequence_parallel: bool) -> None:
    """Another batch or length needs no capture; another structure or mode needs one.

    Nor does a length that sequence parallelism cannot split, once a plan without it is made.
    A buffer that the forward updates in training is updated.
    """
    odd = [1, 0] if sequence_parallel else [0, 0]
    sizes, structures, modes = [0, 0, 0, *odd], [1, 0], [1, 0, 0]
    assert ranks(call_otherwise, 2, sequence_parallel) == [sizes + structures + modes] * 2


def keep_tied() -> None:
    """A tied head is the embedding, before and after; called on every rank."""
    model = assert_trains_alike(plain(tied=True), "auto")
    assert model.head.weight is model.embed.weight
    full = tpcompile.full_state_dict(model)
    assert full["head.weight"] is full["embed.weight"]


def test_tied(ranks: Callable) -> None:
    """Tied weights stay one parameter and one tensor of the state dict."""
    ranks(keep_tied, 2)


def load_on_meta(folder: str) -> None:
    """A model that never was whole gives what the saved one gives; called on every rank."""
    example = plain()
    with torch.device("meta"):
        empty = models.Plain().double().eval()
    tpcompile.shard(empty, mesh(), example.inputs)
    assert all(p.is_meta for p in empty.parameters())
    empty.to_empty(device="cpu")
    assert tpcompile.load_safetensors(empty, folder) == []
    found, wanted = empty(**example.inputs), example.model(**example.inputs)
    assert_close(list(found.values()), list(wanted.values()), EXACT)


def test_meta_then_safetensors(ranks: Callable, tmp_path: Path) -> None:
    """Plan and shard without weights, then read this rank's parts of them."""
    from safetensors.torch import save_file

    save_file(plain().model.state_dict(), tmp_path / "model.safetensors")
    ranks(load_on_meta, 2, str(tmp_path))


def train_alone() -> int:
    """How many collectives the plan for one rank has; called on the only rank."""
    model = assert_trains_alike(plain(), "auto")
    return len(model.plan.collectives)


def test_one_rank(ranks: Callable) -> None:
    """A degree of one is the model itself, without collectives."""
    assert ranks(train_alone, 1) == [0]
