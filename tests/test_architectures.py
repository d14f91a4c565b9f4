"""Architectures of transformers at every degree; `make coverage` makes a page of the same runs."""

from collections import Counter

import pytest
from architectures import ARCHITECTURES
from coverage_page import MACHINE, row_for

import tpcompile
from tpcompile.plan import Plan


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_all(name: str) -> None:
    """At 2, 3, 4 and 8 ranks, with and without sequence parallelism, all is as on one device."""
    row = row_for(name)
    assert row.refused == ""
    assert row.wrong == []


def checked(name: str, tp: int, **options: object) -> Plan:
    """The plan of an architecture; it is right."""
    model, inputs = ARCHITECTURES[name].build()
    report = tpcompile.verify(model, inputs, tp=tp, hardware=MACHINE, **options)  # type: ignore
    assert report.ok, report
    return report.plan


def in_block(plan: Plan) -> Counter[str]:
    """Collectives of the first block's forward pass."""
    return Counter(c.forward for c in plan.collectives if c.forward and ".layers.0." in c.path)


def test_heads_are_split_across_key_heads() -> None:
    """8 heads in 4 groups on 8 ranks: a head each; keys and values whole, as Megatron has them."""
    plan = checked("Llama", 8, sequence_parallel=False)
    styles = {p.name.split(".")[-2]: p.style for p in plan.parameters if ".layers.0." in p.name}
    assert styles == {
        "q_proj": "column", "k_proj": "replicated", "v_proj": "replicated", "o_proj": "row",
        "gate_proj": "column", "up_proj": "column", "down_proj": "row",
        "input_layernorm": "replicated", "post_attention_layernorm": "replicated",
    }  # fmt: skip
    assert in_block(plan) == {"all_reduce": 2}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_routers_are_replicated(sequence_parallel: bool) -> None:
    """What a top-k chooses by is computed whole; experts are split as MLPs are."""
    plan = checked("Mixtral", 4, sequence_parallel=sequence_parallel)
    placed = {p.name: p.style for p in plan.parameters}
    assert placed["model.layers.0.mlp.gate.weight"] == "replicated"
    assert placed["model.layers.0.mlp.experts.gate_up_proj"] == "column"
    expected = {"all_gather": 2, "reduce_scatter": 2} if sequence_parallel else {"all_reduce": 2}
    assert in_block(plan) == expected
