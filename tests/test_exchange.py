"""Plans of other tools: what is exported runs on real ranks and computes what one device does."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from models import scrambled
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import tpcompile
from tpcompile.exchange import (
    from_hf_tp_plan,
    from_parallelize_plan,
    full_names,
    style_text,
    tie_again,
    to_hf_tp_plan,
    to_parallelize_plan,
)

LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BERT = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"} | {
    "max_position_embeddings": 32
}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", LLAMA),
    "qwen2": ("Qwen2ForCausalLM", LLAMA),
    "mistral": ("MistralForCausalLM", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", LLAMA | {"head_dim": 8}),
    "phi3": ("Phi3ForCausalLM", LLAMA | {"pad_token_id": 0}),
    "gpt_neox": ("GPTNeoXForCausalLM", BERT),
    "gpt2": (
        "GPT2LMHeadModel",
        {
            "vocab_size": 64,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 32,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "opt": (
        "OPTForCausalLM",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 32,
            "word_embed_proj_dim": 32,
        },
    ),
    "bert": ("BertForMaskedLM", BERT),
    "bloom": ("BloomForCausalLM", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon": (
        "FalconForCausalLM",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "parallel_attn": False,
        },
    ),
}
"""Model class and its config, by family."""


def small(family: str, **changes: Any) -> nn.Module:
    """A small model of a family in float64, without dropout."""
    kind, fields = SMALL[family]
    cls = getattr(transformers, kind)
    torch.manual_seed(0)
    model = cls(cls.config_class(**fields | changes))
    for module in model.modules():
        if type(module).__name__ == "BloomGelu":  # an autograd.Function, which is not captured
            module.forward = nn.GELU("tanh").forward
    return scrambled(model).eval()


def inputs(family: str) -> dict[str, Tensor]:
    """Tokens and labels; no cache."""
    ids = torch.arange(32).reshape(2, 16) % 60 + 3
    given = {"input_ids": ids, "labels": ids}
    return given if family == "bert" else given | {"use_cache": False}


def plan_for(family: str, tp: int = 2, **changes: Any) -> tpcompile.Plan:
    """What tpcompile plans for a small model."""
    return tpcompile.explain(small(family, **changes), inputs(family), tp=tp).plan


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def differences(family: str, model: nn.Module, changes: dict[str, Any]) -> dict[str, float]:
    """Largest difference of loss, logits and every gradient from the model on one device."""
    one = small(family, **changes)
    given = inputs(family)
    wanted, found = one(**given), model(**given)
    wanted.loss.backward()
    found.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    gaps = {"loss": wanted.loss - found.loss, "logits": wanted.logits - found.logits}
    for name, parameter in one.named_parameters():
        if parameter.grad is not None:
            gaps[name] = parameter.grad - whole(gradients[name])
    return {name: float(gap.abs().max()) for name, gap in gaps.items()}


def run_torch_plan(family: str, plan: Any, changes: dict[str, Any]) -> dict[str, float]:
    """Run by ranks: differences under `parallelize_module`."""
    model = small(family, **changes)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, dict(plan))
    tie_again(model, plan)
    return differences(family, model, changes)


def run_hf_plan(family: str, plan: Any, changes: dict[str, Any]) -> dict[str, float]:
    """Run by ranks: differences under transformers' own tensor parallelism."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model = small(family, **changes)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for name in plan.tied:  # transformers ties after it has applied the plan
        module, _, short = name.rpartition(".")
        own = getattr(model.get_submodule(module), short)
        setattr(model.get_submodule(module), short, nn.Parameter(own.detach().clone()))
    opened = {}
    for name, style in full_names(plan, model).items():
        own = model.get_submodule(name).named_parameters(recurse=False)
        opened |= {f"{name}.{short}": style for short, _ in own} | {name: style}
    apply_tensor_parallelism(model, mesh, opened)
    tie_again(model, plan)
    return differences(family, model, changes)


QUICK = ("llama", "phi3", "gpt_neox", "falcon")
"""Families whose plans differ in kind; the others take the same time and are slow tests."""


@pytest.mark.parametrize(
    "family",
    [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in SMALL],
)
def test_exported_plans_compute_what_one_device_does(family: str, ranks) -> None:
    """Loss, logits and all gradients are equal on two ranks, under torch and transformers."""
    check_on_ranks(family, ranks)


def check_on_ranks(family: str, ranks, **changes: Any) -> None:
    """Export both ways, run both on two ranks."""
    plan, model = plan_for(family, **changes), small(family, **changes)
    for export, run in ((to_parallelize_plan, "run_torch_plan"), (to_hf_tp_plan, "run_hf_plan")):
        given = export(plan, model, inputs(family))
        assert given
        for gaps in ranks(f"test_exchange:{run}", 2, family, given, changes):
            assert max(gaps.values()) < 1e-5, (run, gaps, str(given))


def test_fewer_key_heads_than_ranks(ranks) -> None:
    """One key head on two ranks: tpcompile keeps its weight whole, so queries are gathered."""
    model = small("llama", num_key_value_heads=1)
    plan = to_hf_tp_plan(plan_for("llama", num_key_value_heads=1), model, inputs("llama"))
    assert "model.layers.*.self_attn.k_proj" not in plan
    assert plan["model.layers.*.self_attn.q_proj"] == "colwise_gather_output"
    assert plan["model.layers.*.self_attn.o_proj"] == "rowwise_split_input"
    assert "model.layers.*.self_attn.q_proj" in plan.gathered
    check_on_ranks("llama", ranks, num_key_value_heads=1)


def test_odd_vocabulary(ranks) -> None:
    """A vocabulary that two does not divide is split unevenly by both tools."""
    check_on_ranks("llama", ranks, vocab_size=65)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "qwen3", "gpt_neox"])
def test_exported_plan_is_the_shipped_one(family: str) -> None:
    """Where transformers ships a plan, ours is the same, entry for entry."""
    model = small(family)
    assert to_hf_tp_plan(plan_for(family), model, inputs(family)) == model.tp_plan


def test_what_has_no_style_is_left_whole_and_said() -> None:
    """GPT-2's Conv1D has no style; its tied head and its embeddings have one."""
    plan = to_hf_tp_plan(plan_for("gpt2"), small("gpt2"), inputs("gpt2"))
    assert plan["transformer.wte"] == "embedding_rowwise"
    assert plan["lm_head"] == "colwise_gather_output"
    assert plan.tied == {"lm_head.weight": "transformer.wte.weight"}
    why = "there is no style for Conv1D, only for Linear and Embedding"
    assert plan.left_whole == {
        f"transformer.h.*.{name}.weight": why
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }


def test_fused_halves_are_packed_for_transformers_only() -> None:
    """Phi-3's gate and up: packed for transformers, whose own plan gathers; torch has no style."""
    plan, model = plan_for("phi3"), small("phi3")
    packed = to_hf_tp_plan(plan, model, inputs("phi3"))
    assert packed["model.layers.*.mlp.gate_up_proj"] == "packed_colwise"
    assert packed["model.layers.*.mlp.down_proj"] == "rowwise"
    assert model.tp_plan["model.layers.*.mlp.gate_up_proj"] == "colwise_gather_output"
    for_torch = to_parallelize_plan(plan, model, inputs("phi3"))
    assert style_text(for_torch["model.layers.*.mlp.gate_up_proj"]) == (
        "ColwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())"
    )
    assert "model.layers.*.mlp.gate_up_proj" in for_torch.gathered


def test_an_output_changed_in_place_is_said() -> None:
    """Falcon adds to its MLP's output in place, which autograd refuses under both tools."""
    changes = {"parallel_attn": True}
    plan = to_hf_tp_plan(
        plan_for("falcon", **changes), small("falcon", **changes), inputs("falcon")
    )
    assert list(plan.written) == ["transformer.h.*.mlp.dense_4h_to_h"]
    assert str(plan).splitlines()[-1].startswith("not for training: autograd refuses")


def test_imported_plans_pin_what_they_say() -> None:
    """Llama's own plan as pins gives tpcompile's own plan; so does its torch form."""
    model, wanted = small("llama"), plan_for("llama")
    pins = from_hf_tp_plan(model.tp_plan, model)
    assert pins["model.layers.1.mlp.down_proj.weight"] == Shard(1)
    assert "model.norm.weight" not in pins
    again = tpcompile.explain(model, inputs("llama"), tp=2, plan=pins).plan
    assert again.parameters == wanted.parameters
    as_torch = to_parallelize_plan(wanted, model, inputs("llama"))
    assert from_parallelize_plan(as_torch, model) == pins
    exact = from_hf_tp_plan(model.tp_plan, model, exact=True)
    assert exact == pins | dict.fromkeys(exact.keys() - pins.keys(), Replicate())
    assert exact.keys() == dict(model.named_parameters()).keys()


def test_biases_of_row_parallel_modules_are_whole() -> None:
    """A bias that is added after the reduction is replicated; one beside a column is split."""
    model = small("opt")
    pins = from_hf_tp_plan({"model.decoder.layers.*.fc1": "colwise",
                            "model.decoder.layers.*.fc2": "rowwise"}, model)  # fmt: skip
    assert pins["model.decoder.layers.0.fc1.bias"] == Shard(0)
    assert pins["model.decoder.layers.0.fc2.bias"] == Replicate()


def test_unknown_styles_are_refused() -> None:
    """The error says which are known."""
    with pytest.raises(tpcompile.ShardingError) as caught:
        from_hf_tp_plan({"lm_head": "moe_tp_experts"}, small("llama"))
    assert str(caught.value) == (
        "read the style 'moe_tp_experts' of lm_head in a tp_plan.\n"
        "  its effect is not known here; known are colwise, colwise_gather_output, colwise_rep, "
        "packed_colwise, rowwise, rowwise_split_input, rowwise_rep, embedding_rowwise, "
        "embedding_colwise, replicated_with_grad_allreduce, replicate.\n"
        "  fix: import the plan without this module, and pin its weights by hand"
    )


def test_only_plans_can_be_exported() -> None:
    """The error says what to pass."""
    with pytest.raises(tpcompile.ShardingError) as caught:
        to_hf_tp_plan({}, small("llama"))
    assert str(caught.value) == (
        "export a plan from dict.\n  it is no Plan and has none.\n"
        "  fix: pass explain(model, ..., tp=8) or model.plan of a sharded model"
    )
