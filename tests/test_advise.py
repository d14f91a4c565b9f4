"""What `advise` recommends, and the numbers it is drawn from."""

import builtins
import json
from dataclasses import replace
from functools import partial

import models
import pytest
import torch
from test_hardware import ROUND
from torch import nn

import tpcompile
from tpcompile.advice import Advice
from tpcompile.cost import CostModel
from tpcompile.degrees import USABLE, Degree
from tpcompile.errors import HardwareError, InputError
from tpcompile.hardware import Link
from tpcompile.layout3d import Job, best_layout, layout_for, smallest_layout
from tpcompile.predict import Times

GB = 1e9


def _degree(size: int, state: float, step: float, traffic: float = 0.0, **fields) -> Degree:
    """A rank of a model of four blocks that are all there is."""
    times = Times(step - traffic, traffic, step - traffic, traffic, {})
    known = {
        "sequence_parallel": False, "gradients": 0.0, "block_state": state, "activations": 0.0,
        "block_activations": 0.0, "block_inputs": 0.0, "optimizer_seconds": 0.0,
        "crosses_node": size > 8, "longest": None, "longest_without": None,
    }  # fmt: skip
    return Degree(size=size, state=state, times=times, **{**known, **fields})


FREE = replace(ROUND, inside=Link(100e9, 0.0), between=Link(10e9, 0.0))
JOB = Job(FREE, 10 * GB, blocks=4, batch=1, stream=0.0)


def test_pipeline_by_hand():
    """4 stages, 12 micro-batches: 15 slots of a quarter of the step, 3 of them bubble."""
    layout = layout_for(_degree(1, 8 * GB, 4.0), 4, 1, False, replace(JOB, global_batch=12))
    assert layout is not None
    assert layout.step == pytest.approx(15)
    assert layout.bubble == pytest.approx(3 / 15)
    assert layout.memory == pytest.approx(2 * GB)
    assert layout.samples_per_gpu == pytest.approx(12 / 15 / 4)


def test_first_stage_keeps_the_activations_of_all_stages():
    """One forward, one backward: stages times a stage's activations, so as much as without stages.

    Checkpointing keeps the blocks' inputs and one block's activations, and computes a third more.
    """
    degree = _degree(
        1, 8 * GB, 4.0, activations=4 * GB, block_activations=4 * GB, block_inputs=0.4 * GB
    )
    job = replace(JOB, global_batch=12)
    plain, again = (layout_for(degree, 2, 1, checkpoint, job) for checkpoint in (False, True))
    assert plain is not None
    assert again is not None
    assert plain.memory == pytest.approx(4 * GB + 4 * GB)
    assert again.memory == pytest.approx(4 * GB + 0.4 * GB + 1 * GB)
    assert again.step == pytest.approx(plain.step * 4 / 3)


def test_gradients_hide_behind_the_backward_pass():
    """Replicas add only what their all-reduce takes beyond two thirds of a micro-batch."""
    job = replace(JOB, global_batch=2)
    hidden = layout_for(_degree(8, 1 * GB, 3.0, gradients=GB), 1, 2, False, job)
    exposed = layout_for(_degree(8, 1 * GB, 3.0, gradients=30 * GB), 1, 2, False, job)
    assert hidden is not None
    assert exposed is not None
    assert hidden.step == pytest.approx(3.0)
    # 2 (dp-1)/dp of 30 GB on one network link of 10 GB/s, less the 2 s it hides in.
    assert exposed.step == pytest.approx(3.0 + 3.0 - 2.0, rel=1e-4)
    assert layout_for(_degree(8, GB, 3.0), 1, 4, False, job) is None


def test_layouts_fill_the_node_with_tensor_parallelism_then_stages():
    """The smallest layout that fits, and the best of 64: the wide ring across nodes loses."""
    degrees = [
        _degree(1, 256 * GB, 16.0),
        _degree(8, 32 * GB, 2.2, 0.2),
        _degree(16, 16 * GB, 2.0, 1.0),
    ]
    smallest = smallest_layout(degrees, JOB, None)
    assert smallest is not None
    assert (smallest.tp, smallest.pp, smallest.dp) == (8, 4, 1)
    assert smallest.memory <= USABLE * JOB.memory
    best = best_layout(degrees, JOB, 64)
    assert best is not None
    assert (best.tp, best.pp, best.dp) == (8, 4, 2)
    assert best_layout(degrees, JOB, 7) is None
    assert smallest_layout(degrees, JOB, 8) is None


@pytest.fixture(scope="module")
def small() -> Advice:
    """A Llama of two blocks on a machine that has room for two thirds of it."""
    example = models.llama(num_hidden_layers=2)
    machine = replace(ROUND, memory=0.45e6, launch=0.0, memory_bandwidth=1e12)
    return tpcompile.advise(
        example.model, example.inputs, hardware=machine, degrees=(1, 2, 4, 16), gpus=4
    )


def test_small_model(small: Advice):
    """Memory falls with the degree (4 heads are not for 16), and the text says what fits."""
    memory = [d.memory for d in small.degrees if d.size <= 4]
    assert memory == sorted(memory, reverse=True)
    assert not small.degrees[0].fits(small.job.memory)
    assert small.first_fit in (2, 4)
    assert [d.crosses_node for d in small.degrees] == [False, False, False, True]
    assert small.job.blocks == 2
    assert small.tokens == 16
    text = str(small)
    assert f"the first degree that fits (90% of 0 GB) is {small.first_fit}" in text
    assert "degrees 16 cross the node of 8 devices" in text
    assert f"recommended: tensor parallel degree {small.recommended}" in text


def test_memory_of_one_device_by_hand(small: Advice):
    """Weights, gradients and two moments of each parameter in float64; tables of angles beside."""
    model = models.llama(num_hidden_layers=2).model
    parameters = sum(p.numel() * 8 for p in model.parameters())
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    assert parameters * 4 <= small.degrees[0].state <= parameters * 4 + 2 * buffers


def test_json(small: Advice):
    """Everything in the table, as numbers."""
    told = json.loads(small.to_json())
    assert [d["size"] for d in told["degrees"]] == [1, 2, 4, 16]
    assert told["degrees"][0]["efficiency"] == 1
    assert told["recommended"] == small.recommended
    assert told["layout"]["gpus"] == 4


def test_longest_sequence(small: Advice):
    """Longer with sequence parallelism than without; none where the state alone does not fit."""
    assert small.degrees[0].longest == 0
    fitting = [d for d in small.degrees if d.fits(small.job.memory)]
    assert fitting
    for degree in fitting:
        assert degree.longest is not None
        assert degree.longest_without is not None
        assert degree.longest >= 8
        assert degree.longest >= degree.longest_without


def test_fits_one_device():
    """A small model on a large device wants data parallelism."""
    advice = tpcompile.advise(models.MLP(64, 256), (torch.empty(8, 64),), degrees=(1, 2))
    assert advice.recommended == 1
    assert "tensor parallelism is not needed" in str(advice)
    assert "use data parallelism for all further devices, one replica on one device" in str(advice)


def test_plot_without_matplotlib(small: Advice, monkeypatch: pytest.MonkeyPatch, tmp_path):
    """The error says what to install."""
    real = builtins.__import__

    def without(name: str, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError) as error:
        small.plot("advice.png")
    assert str(error.value) == (
        "advise(...).plot('advice.png')\n"
        "  matplotlib is not installed\n"
        "  fix: pip install matplotlib, or use to_json() and another tool"
    )


def test_errors():
    """Unknown machines, optimizers and degrees are refused before the model is captured."""
    with pytest.raises(HardwareError):
        tpcompile.advise(nn.Linear(2, 2), (torch.empty(1, 2),), hardware="tpu")
    with pytest.raises(InputError, match="optimizer"):
        tpcompile.advise(nn.Linear(2, 2), (torch.empty(1, 2),), optimizer="lion9")
    with pytest.raises(InputError, match="degrees"):
        tpcompile.advise(nn.Linear(2, 2), (torch.empty(1, 2),), degrees=())


def _llama(width: int, ffn: int, *, layers: int, heads: int) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=ffn, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, vocab_size=128256,
        max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config).bfloat16()


def _gpt3(layers: int) -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        n_embd=12288, n_layer=layers, n_head=96, vocab_size=51200, n_positions=2048,
        use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.GPT2LMHeadModel(config).bfloat16()


def _advice(model: nn.Module, seq: int, hardware: str, degrees: tuple[int, ...], **rest) -> Advice:
    ids = torch.zeros(1, seq, dtype=torch.long, device="meta")
    return tpcompile.advise(
        model, {"input_ids": ids, "labels": ids}, hardware=hardware, degrees=degrees,
        optimizer="adamw-mixed", **rest,
    )  # fmt: skip


def test_llama_3_8b():
    """One of its blocks stands for 32: a small degree inside the node, data parallelism beyond.

    18 bytes a parameter in all: 144 GB want at least two devices of 80 GB, and no pipeline.
    """
    advice = _advice(_llama(4096, 14336, layers=2, heads=32), 4096, "a100-nvlink", (1, 2, 4, 8, 16))
    one = advice.degrees[0]
    parameters = 2 * 128256 * 4096 + 2 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336 + 2 * 4096)
    assert one.state == pytest.approx(18 * (parameters + 4096), rel=1e-4)
    eight = next(d for d in advice.degrees if d.size == 8)
    assert eight.sequence_parallel
    assert eight.state == pytest.approx(one.state / 8, rel=1e-3)
    # Forward and backward, two blocks scatter twice and gather twice; embedding and head once.
    ring = CostModel(8, advice.job.hardware).collective("reduce_scatter", 4096 * 4096 * 2)
    assert eight.times.by_kind["reduce_scatter"] == pytest.approx(2 * 5 * ring, rel=0.01)
    assert 0.05 < eight.exposed < 0.5
    steps = [d.step for d in advice.degrees if d.size <= 8]
    assert steps == sorted(steps, reverse=True)
    assert advice.efficiency(eight) < 1
    assert advice.last_worth <= 8
    assert any("cross the node of 8" in w for w in advice.warnings)


def _scaled(degree: Degree, times: float) -> Degree:
    """The same degree of a model with so many times the blocks."""
    more, spent = times - 1, degree.times
    state = degree.state + more * degree.block_state
    return replace(
        degree,
        state=state,
        gradients=degree.gradients * state / degree.state,
        block_state=times * degree.block_state,
        activations=degree.activations + more * degree.block_activations,
        block_activations=times * degree.block_activations,
        block_inputs=times * degree.block_inputs,
        times=Times(
            spent.compute + more * spent.block_compute,
            spent.communication + more * spent.block_communication,
            times * spent.block_compute,
            times * spent.block_communication,
            {},
        ),
        optimizer_seconds=degree.optimizer_seconds * state / degree.state,
    )


PUBLISHED = [
    pytest.param(
        partial(_llama, 4096, 14336, heads=32), 32, 8192, "h100-nvlink", 512, 1024,
        (2, 2), (4, 1), id="8b",
    ),
    pytest.param(
        partial(_llama, 8192, 28672, heads=64), 80, 8192, "a100-nvlink", 256, 1024,
        (8, 4), (8, 16), id="70b",
    ),
    pytest.param(_gpt3, 96, 2048, "a100-nvlink", 1024, 1536, (8, 6), (8, 16), id="175b"),
    pytest.param(
        partial(_llama, 16384, 53248, heads=128), 126, 8192, "h100-nvlink", 8192, 2048,
        (8, 16), (8, 16), id="405b",
    ),
]  # fmt: skip
"""(model of layers, layers, sequence, machine, devices, batch, smallest, best (TP, PP))."""
CASE = "model, layers, seq, hardware, gpus, batch, smallest, best"


@pytest.mark.parametrize(CASE, PUBLISHED)
def test_published_layouts(model, layers, seq, hardware, gpus, batch, smallest, best):
    """What Megatron-LM and the Llama 3 report use: TP 8 inside the node, stages beyond it.

    175B: TP 8 x PP 8 to 12 (Narayanan et al. 2021; Korthikanti et al. 2022); 405B: TP 8 x PP 16
    (Llama 3, table 4); 8B and 70B need less. Two blocks stand for all.
    """
    advice = _advice(model(layers=2), seq, hardware, (1, 2, 4, 8, 16))
    degrees = [_scaled(degree, layers / 2) for degree in advice.degrees]
    job = replace(advice.job, blocks=layers, global_batch=batch)
    least, found = smallest_layout(degrees, job, None), best_layout(degrees, job, gpus)
    assert least is not None
    assert found is not None
    assert (least.tp, least.pp) == smallest
    assert (found.tp, found.pp) == best
    whole = replace(
        advice, degrees=tuple(degrees), job=job, gpus=gpus, smallest=least, layout=found
    )
    assert whole.recommended == best[0]
    said = any("stays inside the node" in reason for reason in whole.reasons)
    assert said == (found.pp > 1)


@pytest.mark.slow
@pytest.mark.parametrize(CASE, PUBLISHED)
def test_whole_models(model, layers, seq, hardware, gpus, batch, smallest, best):
    """All blocks, planned one by one, get the same layouts."""
    advice = _advice(
        model(layers=layers), seq, hardware, (1, 2, 4, 8, 16), gpus=gpus, global_batch=batch
    )
    assert advice.smallest is not None
    assert advice.layout is not None
    assert (advice.smallest.tp, advice.smallest.pp) == smallest
    assert (advice.layout.tp, advice.layout.pp) == best
