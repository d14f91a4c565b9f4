"""`generate` on real ranks: the tokens of one device, local key heads, few captures."""

from typing import Any

import architectures
import pytest
import torch
import torch.distributed as dist
from architectures import Architecture, lm
from plans import TINY
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import DynamicCache

import tpcompile

FREE = {"eos_token_id": None, "forced_eos_token_id": None}
"""Let generation run to its last token."""
FAMILIES = {
    "llama": lm("LlamaForCausalLM"),
    "gpt2": lm("GPT2LMHeadModel"),
    "qwen3": lm("Qwen3ForCausalLM"),
    "neox": lm("GPTNeoXForCausalLM"),
    "phi3": lm("Phi3ForCausalLM"),
    "bloom": lm("BloomForCausalLM"),
    "gemma2": lm("Gemma2ForCausalLM", sliding_window=8),
    "mistral": lm("MistralForCausalLM", sliding_window=8),
    "mamba2": lm("Mamba2ForCausalLM", num_heads=16, head_dim=8, n_groups=1, state_size=8),
    "recurrent": lm("RecurrentGemmaForCausalLM", lru_width=64, num_hidden_layers=3),
    "t5": Architecture("T5ForConditionalGeneration", architectures.pair, architectures.START),
    "bart": Architecture("BartForConditionalGeneration", architectures.pair),
    "whisper": architectures.ARCHITECTURES["Whisper"],
}


def both(name: str) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    """(plain, sharded, what generate is given) of a family, with positions for 64 tokens more."""
    made = FAMILIES[name]
    names = ("max_position_embeddings", "n_positions", "max_target_positions")
    changes = {**made.changes, **dict.fromkeys(names, 128), "use_cache": True}
    family = Architecture(made.model, made.inputs, changes)
    (plain, inputs), (model, _) = family.build(), family.build()
    for each in (plain, model):
        each.generation_config.update(**FREE, pad_token_id=0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    tpcompile.shard(model, mesh, {**inputs, "use_cache": False}, hardware=TINY)
    main = next(n for n in ("input_features", "input_ids") if n in inputs)
    return plain, model, {main: inputs[main]}


def equal(plain: nn.Module, model: nn.Module, given: dict[str, Any], **options: Any) -> None:
    """The same tokens."""
    torch.manual_seed(3)
    wanted = plain.generate(**given, **options)
    torch.manual_seed(3 + dist.get_rank())
    found = model.generate(**given, **options)
    assert torch.equal(found, wanted), f"{found} {wanted}"


def check_families(names: list[str], count: int) -> dict[str, list[str]]:
    """Greedy tokens of all families; captures of each."""
    found = {}
    for name in names:
        plain, model, given = both(name)
        before = len(model.captures)
        equal(plain, model, given, max_new_tokens=count, do_sample=False)
        found[name] = [str(capture) for capture in model.captures[before:]]
    return found


def test_decoder(ranks: Any) -> None:
    """A decoder is captured for prompts and for steps, and no more for longer ones."""
    for captures in ranks(check_families, 2, ["llama"], 16):
        assert captures["llama"] == [
            "model(input_ids[b, s], position_ids[b, s]); eval",
            "model(input_ids[b, 1], position_ids[b, 1]); eval; a cache of 4 tensors",
        ]


def test_encoder_and_decoder(ranks: Any) -> None:
    """An encoder is one capture more."""
    for captures in ranks(check_families, 2, ["t5"], 16):
        assert len(captures["t5"]) == 3
        assert captures["t5"][-1] == "encoder(input_ids[b, s]); eval"


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if name not in ("bart", "mamba2", "recurrent")]
)
def test_families(ranks: Any, size: int, name: str) -> None:
    """64 greedy tokens of each family."""
    ranks(check_families, size, [name], 64, timeout=600.0)


def check_ways() -> tuple[list[str], list[str]]:
    """Ways to generate, with prompts of other lengths and left padding; captures before, after."""
    plain, model, given = both("llama")
    prompt = given["input_ids"]
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0
    equal(plain, model, {"input_ids": prompt, "attention_mask": mask}, max_new_tokens=8)
    before = [str(capture) for capture in model.captures]
    for length in (3, 7, 10):
        cut = {"input_ids": prompt[:, :length], "attention_mask": mask[:, :length]}
        equal(plain, model, cut, max_new_tokens=6, do_sample=False)
        equal(plain, model, cut, max_new_tokens=6, do_sample=True, top_k=20)
        equal(plain, model, cut, max_new_tokens=6, num_beams=3, do_sample=False)
    after = [str(capture) for capture in model.captures]
    for length in (5, 9):
        static = {"cache_implementation": "static", "do_sample": False}
        equal(plain, model, {"input_ids": prompt[:, :length]}, max_new_tokens=6, **static)
        equal(plain, model, {"input_ids": prompt[:, :length]}, max_new_tokens=3, **static)
    assert len(model.captures) == len(after) + 2
    return before, after


def test_ways_to_generate(ranks: Any) -> None:
    """Greedy, sampled though ranks have other seeds, by beams; cached as it grows and in place."""
    for before, after in ranks(check_ways, 2):
        assert before == after


def test_traffic_of_a_step() -> None:
    """Two all-reduces a block, one for the embedding, and a gather of the logits of one token."""
    plain, inputs = FAMILIES["llama"].build()
    cache = DynamicCache(config=plain.config)
    with torch.no_grad():
        plain(input_ids=inputs["input_ids"], cache=cache, use_cache=True)
    step = {"input_ids": inputs["input_ids"][:, -1:], "cache": cache, "use_cache": True}
    plan = tpcompile.explain(plain, step, tp=2, hardware=TINY)
    text = tpcompile.dump(plan, "text")
    assert text.count("= all_reduce(") == 5
    assert text.count("= all_gather(") == 1
    assert "cache.layers.0.keys.2, head_dim] S(layers.0.kv_heads) = input" in text
    report = tpcompile.verify(plain, step, tp=2, hardware=TINY)
    assert report.ok, report
    assert cache.get_seq_length() == inputs["input_ids"].shape[1]


def check_cache() -> tuple[list[int], list[int]]:
    """Bytes of the cache of one device and of a rank; a cache of one device goes on here."""
    plain, model, given = both("llama")
    ids, caches = given["input_ids"], []
    with torch.inference_mode():
        for each in (plain, model):
            caches.append(DynamicCache(config=each.config))
            each(input_ids=ids, cache=caches[-1], use_cache=True)
        sizes = [
            [sum(t.nbytes for t in (layer.keys, layer.values)) for layer in cache.layers]
            for cache in caches
        ]
        wanted = plain(input_ids=ids[:, -1:], cache=caches[0], use_cache=True).logits
        found = model(input_ids=ids[:, -1:], cache=caches[1], use_cache=True).logits
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
        wanted = plain(input_ids=ids[:, :2], cache=caches[0], use_cache=True).logits
        caches[0].crop(-2)
        found = model(input_ids=ids[:, :2], cache=caches[0], use_cache=True)
        torch.testing.assert_close(found.logits, wanted, rtol=0, atol=1e-6)
        assert found.cache is caches[0]
        assert caches[0].layers[0].keys.shape[1] == 4 // dist.get_world_size()
    return sizes[0], sizes[1]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_caches_hold_the_heads_of_a_rank(ranks: Any, size: int) -> None:
    """1/N of the bytes; a cache that is whole is cut, and what was given is what comes back."""
    for whole, part in ranks(check_cache, size):
        assert [size * nbytes for nbytes in part] == whole


def check_modules() -> None:
    """Modules of a sharded model, called by themselves."""
    plain, model, given = both("llama")
    ids = given["input_ids"]
    torch.testing.assert_close(model.model.embed_tokens(ids), plain.model.embed_tokens(ids))
    hidden = plain.model(ids, use_cache=False).last_hidden_state
    mine = model.model(ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(mine, hidden, rtol=0, atol=1e-6)
    torch.testing.assert_close(model.lm_head(hidden), plain.lm_head(hidden), rtol=0, atol=1e-6)
    for each in (plain, model):
        each.model(ids, use_cache=False).last_hidden_state.square().sum().backward()
    whole = model.model.layers[0].self_attn.q_proj.weight.grad.full_tensor()
    wanted = plain.model.layers[0].self_attn.q_proj.weight.grad
    torch.testing.assert_close(whole, wanted, rtol=1e-5, atol=1e-6)


def test_modules_called_by_themselves(ranks: Any) -> None:
    """Outputs and gradients are those of one device."""
    ranks(check_modules, 2)


def check_half() -> str:
    """Generation in bf16 is the same on all ranks; none of its graphs waits for a device."""
    _, model, given = both("llama")
    model.bfloat16()
    tokens = model.generate(**given, max_new_tokens=8, do_sample=False)
    assert not any(capture.host_syncs for capture in model.captures)
    return str(tokens.tolist())


def test_half_precision(ranks: Any) -> None:
    """Weights in bf16."""
    first, second = ranks(check_half, 2)
    assert first == second


def check_disagreement() -> str:
    """The error of ranks with other prompts."""
    _, model, given = both("llama")
    ids = given["input_ids"] + dist.get_rank()
    with pytest.raises(tpcompile.RankMismatchError) as caught:
        model.generate(input_ids=ids, max_new_tokens=2)
    return str(caught.value)


def test_ranks_that_disagree(ranks: Any) -> None:
    """Other prompts on another rank are an error, and nothing hangs."""
    text = ranks(check_disagreement, 2)[0]
    assert text.splitlines()[0] == (
        "generate with a sharded LlamaForCausalLM on all ranks of the axis"
    )
    assert "ranks 0 and 1 differ in input_ids" in text


def check_refused() -> list[str]:
    """Errors of what cannot generate."""
    found = []
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for name, options in (("llama", {"outputs": "sharded"}), ("recurrent", {})):
        model, inputs = FAMILIES[name].build()
        example = {"input_ids": inputs["input_ids"], "use_cache": False}
        tpcompile.shard(model, mesh, example, hardware=TINY, **options)
        with pytest.raises(tpcompile.TpcompileError) as caught:
            model.generate(inputs["input_ids"], max_new_tokens=2, use_cache=True)
        found.append(str(caught.value).replace("\n", ""))
    return found


def test_what_cannot_generate(ranks: Any) -> None:
    """Logits in pieces, and state that is in no cache."""
    pieces, state = ranks(check_refused, 2)[0]
    assert "its logits leave it as DTensors (outputs=)" in pieces
    assert "its forward keeps state in attributes: model.layers.0.temporal_block" in state


def check_lengths(sequence_parallel: bool) -> list[str]:
    """A run with 20 lengths."""
    plain, model, given = both("llama")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    other = FAMILIES["llama"].build()[0]
    ids = torch.cat([given["input_ids"]] * 2, 1)
    options = {"sequence_parallel": sequence_parallel, "hardware": TINY}
    model = tpcompile.shard(other, mesh, {"input_ids": ids, "use_cache": False}, **options)
    with torch.no_grad():
        for length in range(3, 23):
            wanted = plain(input_ids=ids[:, :length], use_cache=False).logits
            found = model(input_ids=ids[:, :length], use_cache=False).logits
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    return [str(capture) for capture in model.captures]


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
def test_lengths(ranks: Any, sequence_parallel: bool) -> None:
    """20 lengths are one capture, and with sequence parallelism one more for odd ones."""
    plain = "model(input_ids[b, s]); eval"
    captures = [f"{plain}; degree divides s", plain] if sequence_parallel else [plain]
    assert ranks(check_lengths, 2, sequence_parallel) == [captures] * 2
