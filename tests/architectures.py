"""Small models of transformers' architectures, made from their configs with random weights."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from models import scrambled
from torch import Tensor, nn

SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 8),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 8),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "hidden_dim", "n_inner"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    **dict.fromkeys(("head_dim", "d_kv"), 8),
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "embd_pdrop"), 0.0),
    **dict.fromkeys(("hidden_dropout", "hidden_dropout_prob", "resid_pdrop", "attn_pdrop"), 0.0),
    **dict.fromkeys(("attention_probs_dropout_prob", "dropout_rate", "layerdrop"), 0.0),
    **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop", "classifier_dropout"), 0.0),
    "vocab_size": 96,
    "image_size": 16,
    "patch_size": 4,
    "use_cache": False,
}
"""Under every name that some config has for it; a config takes those that it knows."""


@dataclass(frozen=True)
class Architecture:
    """One row of the coverage page."""

    model: str
    """Class of transformers."""
    inputs: Callable[[], dict[str, Any]]
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Config values that differ from `SMALL`."""

    def build(self) -> tuple[nn.Module, dict[str, Any]]:
        """The model in float64, with weights that make every fault visible, and its inputs."""
        torch.manual_seed(0)
        kind = getattr(transformers, self.model)
        config = _config(kind.config_class, self.changes)
        config._attn_implementation = "sdpa" if kind._supports_sdpa else "eager"
        config._experts_implementation = "batched_mm"  # the default has no float64
        return scrambled(kind(config)).eval(), self.inputs()


def _config(kind: type, changes: Mapping[str, Any]) -> Any:
    names = {n: n for n in inspect.signature(kind.__init__).parameters} | kind.attribute_map
    small = {names[k]: v for k, v in SMALL.items() if k in names}
    return kind(**small | {names.get(k, k): v for k, v in changes.items()})


def ids(length: int = 12, *, batch: int = 2, seed: int = 3) -> Tensor:
    """Token ids [batch, length] that are no special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 96, (batch, length), generator=generator)


def noise(*shape: int) -> Tensor:
    """Random numbers in float64, the same ones always."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def tokens() -> dict[str, Any]:
    """A language model's inputs: labels are the ids."""
    return {"input_ids": ids(), "labels": ids()}


def pair() -> dict[str, Any]:
    """Source and target sequences of different lengths."""
    return {"input_ids": ids(), "labels": ids(8, seed=4), "use_cache": False}


def pixels(size: int = 16, *, labels: bool = True) -> dict[str, Any]:
    """Two images."""
    return {"pixel_values": noise(2, 3, size, size)} | (
        {"labels": torch.tensor([0, 1])} if labels else {}
    )


def images() -> dict[str, Any]:
    """Two images, for a model without a head."""
    return pixels(labels=False)


def image_and_text() -> dict[str, Any]:
    """As many texts as images."""
    return {"input_ids": ids(), "return_loss": True, **images()}


def spectrogram() -> dict[str, Any]:
    """Mel features [batch, mels, frames] and target tokens."""
    return {"input_features": noise(2, 16, 64), "labels": ids(8, seed=4), "use_cache": False}


def waves() -> dict[str, Any]:
    """Raw audio, for a model without a head."""
    return {"input_values": noise(2, 1600)}


def lm(model: str, **changes: Any) -> Architecture:
    """A causal or masked language model."""
    return Architecture(model, tokens, changes)


MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
MLA = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "head_dim": 4, "num_key_value_heads": 8, "moe_intermediate_size": 32,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
AUDIO = {
    "conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 8),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2, "hidden_dropout": 0.0, "feat_proj_dropout": 0.0,
    "mask_time_prob": 0.0, "apply_spec_augment": False,
}  # fmt: skip
START = {"decoder_start_token_id": 0}
TOWER = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
}  # fmt: skip
TEXT = TOWER | {"vocab_size": 96, "max_position_embeddings": 64, "eos_token_id": 2}
VISION = TOWER | {"image_size": 16, "patch_size": 4}

DECODERS = {
    "Llama": lm("LlamaForCausalLM"),
    "Mistral": lm("MistralForCausalLM", sliding_window=6),
    "Ministral": lm("MinistralForCausalLM", sliding_window=6),
    "Qwen2": lm("Qwen2ForCausalLM"),
    "Qwen3": lm("Qwen3ForCausalLM"),
    "Gemma": lm("GemmaForCausalLM"),
    "Gemma 2": lm("Gemma2ForCausalLM", sliding_window=6),
    "Gemma 3": lm("Gemma3ForCausalLM", sliding_window=6),
    "Phi": lm("PhiForCausalLM"),
    "Phi-3": lm("Phi3ForCausalLM", num_key_value_heads=8, sliding_window=None),
    "Phi-3 grouped": lm("Phi3ForCausalLM"),
    "GPT-2": lm("GPT2LMHeadModel"),
    "GPT-J": lm("GPTJForCausalLM", rotary_dim=4),
    "GPT-Neo": lm("GPTNeoForCausalLM", attention_types=[[["global", "local"], 1]], window_size=6),
    "GPT-NeoX": lm("GPTNeoXForCausalLM"),
    "GPT-BigCode": lm("GPTBigCodeForCausalLM"),
    "BLOOM": lm("BloomForCausalLM"),
    "Falcon": lm("FalconForCausalLM", num_kv_heads=8, multi_query=True),
    "Falcon 40B": lm("FalconForCausalLM", new_decoder_architecture=True, num_kv_heads=4),
    "MPT": lm("MptForCausalLM"),
    "OPT": lm("OPTForCausalLM"),
    "OLMo": lm("OlmoForCausalLM"),
    "OLMo 2": lm("Olmo2ForCausalLM"),
    "OLMo 3": lm("Olmo3ForCausalLM", sliding_window=6),
    "Cohere": lm("CohereForCausalLM"),
    "Cohere 2": lm("Cohere2ForCausalLM", sliding_window=6),
    "Granite": lm("GraniteForCausalLM", residual_multiplier=0.3),
    "StarCoder 2": lm("Starcoder2ForCausalLM"),
    "StableLM": lm("StableLmForCausalLM"),
    "Nemotron": lm("NemotronForCausalLM"),
    "Persimmon": lm("PersimmonForCausalLM"),
    "CodeGen": lm("CodeGenForCausalLM", rotary_dim=4),
    "BioGPT": lm("BioGptForCausalLM"),
    "GLM": lm("GlmForCausalLM"),
    "GLM-4": lm("Glm4ForCausalLM"),
    "SmolLM3": lm("SmolLM3ForCausalLM"),
    "Helium": lm("HeliumForCausalLM"),
    "ERNIE 4.5": lm("Ernie4_5ForCausalLM"),
    "EXAONE 4": lm("Exaone4ForCausalLM", sliding_window=6),
    "Arcee": lm("ArceeForCausalLM"),
    "Seed-OSS": lm("SeedOssForCausalLM"),
    "Apertus": lm("ApertusForCausalLM"),
    "Hunyuan": lm("HunYuanDenseV1ForCausalLM"),
    "DiffLlama": lm("DiffLlamaForCausalLM"),
    "BitNet": lm("BitNetForCausalLM"),
}
EXPERTS = {
    "Mixtral": lm("MixtralForCausalLM", **MOE),
    "Qwen2-MoE": lm(
        "Qwen2MoeForCausalLM", moe_intermediate_size=32, shared_expert_intermediate_size=48, **MOE
    ),
    "Qwen3-MoE": lm("Qwen3MoeForCausalLM", moe_intermediate_size=32, **MOE),
    "OLMoE": lm("OlmoeForCausalLM", **MOE),
    "Phi-3.5-MoE": lm("PhimoeForCausalLM", **MOE),
    "GPT-OSS": lm("GptOssForCausalLM", sliding_window=6, **MOE),
    "Granite-MoE": lm("GraniteMoeForCausalLM", **MOE),
    "DeepSeek-V2": lm("DeepseekV2ForCausalLM", **MLA, topk_method="greedy"),
    "DeepSeek-V3": lm("DeepseekV3ForCausalLM", **MLA),
}
ENCODERS = {
    "BERT": lm("BertForMaskedLM"),
    "RoBERTa": lm("RobertaForMaskedLM", pad_token_id=1),
    "XLM-R": lm("XLMRobertaForMaskedLM", pad_token_id=1),
    "ELECTRA": lm("ElectraForMaskedLM", embedding_size=32),
    "ALBERT": lm("AlbertForMaskedLM", embedding_size=32),
    "DistilBERT": lm("DistilBertForMaskedLM"),
    "DeBERTa-v2": lm(
        "DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"]
    ),
    "ModernBERT": lm("ModernBertForMaskedLM", local_attention=6),
    "MPNet": lm("MPNetForMaskedLM", pad_token_id=1),
    "ESM": lm("EsmForMaskedLM", position_embedding_type="rotary", mask_token_id=4),
    "Megatron-BERT": lm("MegatronBertForMaskedLM"),
    "RemBERT": lm("RemBertForMaskedLM"),
}  # fmt: skip
PAIRS = {
    "T5": Architecture("T5ForConditionalGeneration", pair, START),
    "T5 v1.1": Architecture(
        "T5ForConditionalGeneration", pair,
        START | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "BART": Architecture("BartForConditionalGeneration", pair),
    "mBART": Architecture("MBartForConditionalGeneration", pair),
    "Pegasus": Architecture("PegasusForConditionalGeneration", pair),
    "Marian": Architecture("MarianMTModel", pair, START | {"decoder_vocab_size": 96}),
    "M2M-100": Architecture("M2M100ForConditionalGeneration", pair),
    "Whisper": Architecture(
        "WhisperForConditionalGeneration", spectrogram,
        START | {"num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32},
    ),
}  # fmt: skip
SIGHT_AND_SOUND = {
    "ViT": Architecture("ViTForImageClassification", pixels),
    "DeiT": Architecture("DeiTForImageClassification", pixels),
    "BEiT": Architecture(
        "BeitForImageClassification", pixels, {"use_relative_position_bias": True}
    ),
    "DINOv2": Architecture("Dinov2ForImageClassification", pixels, {"mlp_ratio": 2}),
    "Swin": Architecture(
        "SwinForImageClassification", pixels,
        {"embed_dim": 16, "depths": [1, 1], "num_heads": [4, 8], "window_size": 2, "patch_size": 2},
    ),
    "CLIP": Architecture(
        "CLIPModel", image_and_text,
        {"text_config": TEXT, "vision_config": VISION, "projection_dim": 32},
    ),
    "SigLIP": Architecture(
        "SiglipModel", image_and_text, {"text_config": TEXT, "vision_config": VISION},
    ),
    "Wav2Vec2": Architecture("Wav2Vec2Model", waves, AUDIO),
    "HuBERT": Architecture("HubertModel", waves, AUDIO),
}  # fmt: skip
STATE_SPACE = {
    "Mamba": lm("MambaForCausalLM", state_size=8, time_step_rank=8),
    "Mamba-2": lm(
        "Mamba2ForCausalLM", num_heads=16, head_dim=8, n_groups=2, state_size=8, chunk_size=4
    ),
}

ARCHITECTURES: dict[str, Architecture] = {
    **DECODERS,
    **EXPERTS,
    **ENCODERS,
    **PAIRS,
    **SIGHT_AND_SOUND,
    **STATE_SPACE,
}
