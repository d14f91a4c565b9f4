"""`outputs="sharded"`: split outputs leave as DTensors, with the same values and gradients."""

import copy
from collections.abc import Callable

import models
import pytest
import torch
import torch.distributed as dist
from models import MODELS
from plans import TINY
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

import tpcompile
from tpcompile.errors import InputError


@pytest.mark.parametrize("name", ["plain", "llama", "gpt2", "bert"])
def test_no_logits_are_gathered(name: str) -> None:
    """The pieces, joined, are what one device gives, and so are all gradients."""
    example = MODELS[name]()
    report = tpcompile.verify(
        example.model, example.inputs, tp=2, outputs="sharded", hardware=TINY,
        sequence_parallel=False,
    )  # fmt: skip
    assert report.ok, report
    path = "lm_head" if name != "bert" else "-"
    assert not any(c.kind == "all_gather" and c.path == path for c in report.plan.collectives)


def train_on_logits() -> tuple[float, float]:
    """Loss of sharded logits by torch's own means, and of whole ones; called on every rank."""
    example = models.llama()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    inputs = {"input_ids": example.inputs["input_ids"], "use_cache": False}
    model = copy.deepcopy(example.model)
    tpcompile.shard(model, mesh, inputs, outputs="sharded", hardware=TINY, sequence_parallel=False)
    logits = model(**inputs).logits
    assert isinstance(logits, DTensor)
    assert logits.placements == (Shard(2),)
    labels = inputs["input_ids"].flatten()
    with loss_parallel():
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels)
        loss.backward()
    whole = example.model(**inputs).logits
    torch.testing.assert_close(logits.full_tensor(), whole, rtol=1e-6, atol=1e-6)
    expected = torch.nn.functional.cross_entropy(whole.flatten(0, 1), labels)
    expected.backward()
    for (_, p), (_, q) in zip(
        model.named_parameters(), example.model.named_parameters(), strict=True
    ):
        assert isinstance(p.grad, DTensor)
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-5, atol=1e-7)
    return float(loss.full_tensor()), float(expected)  # type: ignore[attr-defined]


def test_loss_parallel(ranks: Callable) -> None:
    """Logits split by vocabulary go into torch's `loss_parallel` as they are."""
    for loss, expected in ranks(train_on_logits, 2):
        assert loss == pytest.approx(expected, rel=1e-6)


def test_neither() -> None:
    """The whole text of the error."""
    with pytest.raises(InputError) as caught:
        tpcompile.verify(torch.nn.Linear(4, 4), torch.ones(2, 4), tp=2, outputs="split")
    assert str(caught.value) == (
        "outputs='split'\n"
        "  outputs are whole on every rank, or DTensors where they are split\n"
        '  fix: pass "replicated" or "sharded"'
    )
