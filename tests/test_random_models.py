"""Random models, pins and plans: whatever is sharded in whatever way is what it was."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from plans import EAGER
from random_models import KINDS, Step, chain
from torch import fx
from torch.distributed.tensor import Replicate, Shard

import tpcompile
from tpcompile.errors import TpcompileError
from tpcompile.placement import R, State
from tpcompile.strategies import Choices, Strategy

STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(KINDS),
        st.integers(0, 11),
        st.integers(0, 11),
        st.integers(0, 11),
    ),
    min_size=1,
    max_size=9,
)
PINS = st.dictionaries(
    st.sampled_from(["embed.weight", "head.*", "parts.0.*", "parts.1.weight", "parts.2.weight"]),
    st.sampled_from([Shard(0), Shard(1), Replicate()]),
    max_size=2,
)
BOUNDED = settings(
    max_examples=12,
    phases=[Phase.explicit, Phase.generate],
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


@contextmanager
def any_plan(seed: int) -> Iterator[None]:
    """Prices at random, so that any plan that is allowed may be the cheapest."""
    listed = Choices.strategies

    def strategies(self: Choices, node: fx.Node) -> list[Strategy]:
        draw = random.Random(f"{seed} {node.name}")
        return [replace(s, ticks=float(int(draw.random() ** 2 * 2e9))) for s in listed(self, node)]

    def resident_ticks(self: Choices, node: fx.Node, state: State) -> float:
        draw = random.Random(f"{seed} {node.name} {'' if state == R else str(state)}")
        return float(int(draw.random() * 1e9))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Choices, "strategies", strategies)
        patch.setattr(Choices, "resident_ticks", resident_ticks)
        yield


@BOUNDED
@given(steps=STEPS, tp=st.integers(1, 4), vocab=st.integers(9, 13), pins=PINS)
def test_any_model(steps: list[Step], tp: int, vocab: int, pins: dict) -> None:
    """Outputs and gradients are those of one device, or a TpcompileError says why not."""
    model, inputs = chain(steps, vocab)
    named = {name for name, _ in model.named_parameters()}
    pins = {p: to for p, to in pins.items() if p.replace("*", "weight") in named}
    try:
        report = tpcompile.verify(model, inputs, tp=tp, plan=pins, hardware=EAGER)
    except TpcompileError:
        assert pins
        return
    assert report.ok, report
    if tp == 1:
        assert not report.plan.collectives


@BOUNDED
@given(steps=STEPS, tp=st.integers(2, 4), seq=st.integers(5, 8), seed=st.integers(0, 999))
def test_any_plan(steps: list[Step], tp: int, seq: int, seed: int) -> None:
    """Also with a plan that no cost model would choose."""
    model, inputs = chain(steps, seq=seq)
    with any_plan(seed):
        report = tpcompile.verify(model, inputs, tp=tp)
    assert report.ok, report
