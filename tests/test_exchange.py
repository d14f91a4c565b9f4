"""Plans of other tools: what is exported runs on real ranks and computes what one device does."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import tpcompile
from models import scrambled
from tpcompile.exchange import (
    from_hf_tp_plan,
    from_parallelize_plan,
    full_names,
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
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4,
                                 "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2}),
    "opt": ("OPTForCausalLM", {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 48,
                               "num_hidden_layers": 2, "num_attention_heads": 4,
                               "max_position_embeddings": 32, "word_embed_proj_dim": 32}),
    "bert": ("BertForMaskedLM", BERT),
    "bloom": ("BloomForCausalLM", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon": ("FalconForCausalLM", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
                                     "num_attention_heads": 4, "parallel_attn": False}),
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


@pytest.mark.parametrize("family", SMALL)
def test_exported_plans_compute_what_one_device_does(family: str, ranks) -> None:
    """Loss, logits and all gradients are equal on two ranks, under torch and transformers."""
    plan = plan_for(family)
    model = small(family)
    for export, run in ((to_parallelize_plan, "run_torch_plan"), (to_hf_tp_plan, "run_hf_plan")):
        given = export(plan, model, inputs(family))
        assert given
        for gaps in ranks(f"test_exchange:{run}", 2, family, given, {}):
            assert max(gaps.values()) < 1e-5, (run, gaps, str(given))
