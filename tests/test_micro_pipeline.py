"""What Inductor's matcher takes of the graphs we emit, and its own passes over them."""

import pytest
import torch
from llama import assert_close, gradients, llama, loss_for, pair, tokens
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import tpcompile
from tpcompile.errors import TpcompileError
from tpcompile.micro_pipeline import KINDS
from tpcompile.torch_private import gather_matches, post_grad_backend, scatter_matches

GATHERS, SCATTERS = KINDS


def on_meta(layers, batch=2):
    """A Llama without weights, and its inputs."""
    with torch.device("meta"):
        config = LlamaConfig(
            vocab_size=32000, hidden_size=4096, intermediate_size=11008,
            num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8,
        )  # fmt: skip
        ids = torch.zeros(batch, 1024, dtype=torch.long)
        model = LlamaForCausalLM(config).bfloat16()
    return model, {"input_ids": ids, "labels": ids, "use_cache": False}


def readiness(model, inputs, tp=8, **options):
    """Of a plan without ranks."""
    return tpcompile.micro_pipeline(tpcompile.explain(model, inputs, tp=tp, **options))


def test_every_pair_of_a_llama_is_fusable():
    """Forward: the gathers before q|k|v, gate|up and the head, the scatters after o and down."""
    ready = readiness(*on_meta(2), sequence_parallel=True)
    assert str(ready) == (
        "fusable all_gather+matmul 5/5, matmul+reduce_scatter 4/4\n"
        "backward all_gather+matmul 4/4, matmul+reduce_scatter 1/5\n"
        "not fused: 2 x backward matmul+reduce_scatter: it scatters the sum of 2 matmuls\n"
        "not fused: 2 x backward matmul+reduce_scatter: it scatters the sum of 3 matmuls\n"
        "no matmul beside: 1 x forward reduce_scatter\n"
        "no matmul beside: 1 x forward all_gather\n"
        "no matmul beside: 1 x backward all_gather"
    )
    paths = [pair.path for pair in ready.pairs if pair.direction == "forward"][:4]
    assert paths == [
        f"model.layers.0.{name}"
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    ]


@pytest.mark.slow
def test_every_pair_of_many_layers_is_fusable():
    """32 layers."""
    ready = readiness(*on_meta(32), sequence_parallel=True)
    assert (ready.count(GATHERS), ready.count(SCATTERS)) == ((65, 65), (64, 64))


def test_a_batch_of_one_is_fusable():
    """Forward; its gathers lie along the first dim that is not 1, in another form."""
    ready = readiness(*on_meta(1, batch=1), sequence_parallel=True)
    assert (ready.count(GATHERS), ready.count(SCATTERS)) == ((3, 3), (2, 2))


def test_without_sequence_parallelism_there_is_nothing_to_fuse():
    """All-reduces are not what it fuses."""
    ready = readiness(*on_meta(1), sequence_parallel=False)
    assert (ready.count(GATHERS), ready.count(SCATTERS)) == ((0, 0), (0, 0))


class Batched(nn.Module):
    """A matmul that is no linear reads the gathered stream."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.weight = nn.Parameter(torch.randn(2, 64, 256))
        self.back = nn.Parameter(torch.randn(2, 256, 64))

    def forward(self, x):
        """x: [2, s, 64] -> [2, s, 64]."""
        return x + torch.bmm(torch.bmm(self.norm(x), self.weight).relu(), self.back)


def test_misses_have_their_reason():
    """Matmuls that the matcher does not know, in both directions."""
    ready = readiness(Batched(), (torch.randn(2, 8, 64),), tp=2, sequence_parallel=True)
    assert str(ready) == (
        "fusable all_gather+matmul 0/1, matmul+reduce_scatter 0/0\n"
        "backward all_gather+matmul 0/0, matmul+reduce_scatter 0/1\n"
        "not fused: 1 x forward all_gather+matmul: read by bmm, not by mm\n"
        "not fused: 1 x backward matmul+reduce_scatter: made by bmm, not by mm"
    )


def check_compiled():
    """Pairs that the matcher finds in what torch.compile itself makes of a sharded model."""
    _, model = pair(True, layers=1)
    wanted = tpcompile.micro_pipeline(model)
    found: list = []
    torch.compiler.reset()
    call = torch.compile(model, fullgraph=True, backend=post_grad_backend(found))
    loss_for(call, tokens()).backward()
    pairs = [
        (
            sum(map(bool, gather_matches(graph).values())),
            sum(each is not None for each in scatter_matches(graph).values()),
        )
        for _, graph in found
    ]
    ways = ("forward", "backward")
    return pairs, [tuple(wanted.count(kind, way)[0] for kind in KINDS) for way in ways]


@pytest.mark.slow
def test_the_report_is_what_the_compiler_sees(ranks):
    """The same pairs in the graphs of torch.compile, on ranks."""
    for found, wanted in ranks(check_compiled, 2):
        assert found == wanted
        assert found[0] == (3, 2)


def check_options():
    """Loss and gradients with Inductor's passes over the collectives."""
    torch.compiler.reset()
    plain, model = pair(True, layers=1)
    options = tpcompile.inductor_options(model)
    call = torch.compile(model, fullgraph=True, options=options)
    losses = []
    for each in (plain, call):
        losses.append(loss_for(each, tokens()))
        losses[-1].backward()
    assert_close(losses[1].detach(), losses[0].detach(), 1e-8)
    assert_close(gradients(model), gradients(plain), 1e-8)
    with pytest.raises(TpcompileError) as caught:
        tpcompile.inductor_options(model, micro_pipeline=True)
    return options, str(caught.value)


@pytest.mark.slow
def test_inductor_schedules_collectives(ranks):
    """Its reordering runs on our graphs, and the numbers stay."""
    for options, text in ranks(check_options, 2, timeout=600.0):
        assert options["reorder_for_compute_comm_overlap"] is True
        assert "_micro_pipeline_tp" not in options
        assert text == (
            "inductor_options(LlamaForCausalLM, micro_pipeline=True)\n"
            "  the mesh is of cpu devices, which have no symmetric memory\n"
            "  fix: leave it out; tpcompile.micro_pipeline(model) says what GPUs would fuse"
        )


def test_options_are_for_sharded_models():
    """Nothing is to be scheduled in a plain one."""
    with pytest.raises(TpcompileError, match="the model is not sharded"):
        tpcompile.inductor_options(llama(1))
