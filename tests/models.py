"""Small models with random weights for tests: Hugging Face architectures, and a plain one."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 48
"""Tokens of every model unless told otherwise."""


@dataclass(frozen=True)
class Example:
    """A model and the arguments of one call."""

    model: nn.Module
    inputs: dict[str, Any] = field(default_factory=dict)
    single: bool = False
    """Whether the model computes something in float32 although its weights are float64."""


class Block(nn.Module):
    """Pre-norm attention (fused q, k, v of unequal widths) and a gated MLP."""

    def __init__(self, width: int, heads: int, kv_heads: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.dim, self.heads, self.kv_heads = width // heads, heads, kv_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.dim)
        self.out = nn.Linear(heads * self.dim, width)
        self.gate_up = nn.Linear(width, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, hidden] -> [b, s, hidden]."""
        widths = [self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim]
        q, k, v = self.qkv(self.norm1(x)).split(widths, -1)
        q = q.unflatten(-1, (self.heads, self.dim)).transpose(1, 2)
        k = k.unflatten(-1, (self.kv_heads, self.dim)).transpose(1, 2)
        v = v.unflatten(-1, (self.kv_heads, self.dim)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).flatten(2)))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.drop(self.down(F.silu(gate) * up))


class Plain(nn.Module):
    """A decoder with learned positions and a buffer that counts the calls in training."""

    def __init__(
        self,
        width: int = 32,
        heads: int = 4,
        kv_heads: int = 2,
        ffn: int = 48,
        vocab: int = VOCAB,
        layers: int = 2,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.zeros(16, width))
        self.blocks = nn.ModuleList(
            Block(width, heads, kv_heads, ffn, dropout) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Logits [b, s, vocab], and the mean loss where labels are given."""
        if self.training:
            self.calls.add_(1)
        x = self.embed(ids) + self.position[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


class MLP(nn.Module):
    """Two linear layers: the smallest model that has something to shard."""

    def __init__(self, width: int = 8, ffn: int = 12) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, ffn), nn.Linear(ffn, width)

    def forward(self, x: Tensor) -> Tensor:
        """[*b, hidden] -> [*b, hidden]."""
        return self.down(F.gelu(self.up(x)))


@torch.no_grad()
def scrambled(model: nn.Module, seed: int = 1) -> nn.Module:
    """The model in float64, no bias 0 and no gain 1, so that adding one twice shows."""
    generator = torch.Generator().manual_seed(seed)
    model.double()
    for parameter in model.parameters():
        scale = 0.5 / math.sqrt(parameter.shape[-1]) if parameter.ndim > 1 else 0.2
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.add_(noise * scale)
    return model


def token_ids(batch: int = 2, seq: int = 8, vocab: int = VOCAB, seed: int = 7) -> Tensor:
    """Fixed random ids [b, s], none of them a usual special token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, vocab, (batch, seq), generator=generator)


def plain(*, train: bool = False, batch: int = 2, seq: int = 8, **config: Any) -> Example:
    """A `Plain` with labels, one of them ignored."""
    torch.manual_seed(0)
    model = scrambled(Plain(**config)).train(train)
    ids = token_ids(batch, seq, config.get("vocab", VOCAB))
    labels = ids.roll(-1, 1)
    labels[0, -1] = -100
    return Example(model, {"ids": ids, "labels": labels})


def _hf(name: str, config_name: str, **config: Any) -> Example:
    import transformers

    torch.manual_seed(0)
    settings = getattr(transformers, config_name)(**config)
    settings._attn_implementation = "sdpa"
    model = scrambled(getattr(transformers, name)(settings)).eval()
    if name == "ViTForImageClassification":
        generator = torch.Generator().manual_seed(7)
        pixels = torch.randn(2, 3, 16, 16, generator=generator, dtype=torch.float64)
        return Example(model, {"pixel_values": pixels, "labels": torch.tensor([1, 3])})
    ids = token_ids()
    inputs = {"input_ids": ids, "labels": ids.clone()}
    if name == "BertForMaskedLM":
        return Example(model, inputs)
    # Causal models compute the loss in float32, and would return keys and values whole.
    return Example(model, {**inputs, "use_cache": False}, single=True)


def gpt2(layers: int = 2) -> Example:
    """Fused c_attn stored [in, out], tied head, learned positions."""
    return _hf(
        "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCAB, n_positions=16, n_embd=32,
        n_layer=layers, n_head=4, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


_LLAMA = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip


def llama(layers: int = 2, **config: Any) -> Example:
    """Grouped queries, rotary positions, gated MLP, untied head."""
    settings = {**_LLAMA, "num_hidden_layers": layers, **config}
    return _hf("LlamaForCausalLM", "LlamaConfig", **settings)


def qwen2() -> Example:
    """As Llama, with biases on q, k and v, and a tied head."""
    settings = {**_LLAMA, "num_hidden_layers": 2, "tie_word_embeddings": True}
    return _hf("Qwen2ForCausalLM", "Qwen2Config", **settings)


def bert() -> Example:
    """Post-norm encoder, masked-token head with a bias of its own."""
    return _hf(
        "BertForMaskedLM", "BertConfig", vocab_size=VOCAB, hidden_size=32,
        num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=16,
    )  # fmt: skip


def opt() -> Example:
    """Learned positions with an offset, ReLU, tied head."""
    return _hf(
        "OPTForCausalLM", "OPTConfig", vocab_size=VOCAB, hidden_size=32, ffn_dim=48,
        num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=16,
        word_embed_proj_dim=32, pad_token_id=1,
    )  # fmt: skip


def vit() -> Example:
    """Patches by a convolution, a class token, an odd sequence length."""
    return _hf(
        "ViTForImageClassification", "ViTConfig", hidden_size=32,
        num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16,
        patch_size=8, num_labels=5,
    )  # fmt: skip


def gptj(layers: int = 2) -> Example:
    """Attention and MLP in parallel behind one norm."""
    return _hf(
        "GPTJForCausalLM", "GPTJConfig", vocab_size=VOCAB, n_positions=16, n_embd=32,
        n_layer=layers, n_head=4, rotary_dim=4, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def neox(layers: int = 2) -> Example:
    """Attention and MLP in parallel, each behind a norm of its own; q, k, v interleaved by head."""
    return _hf(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", vocab_size=VOCAB, hidden_size=32,
        num_hidden_layers=layers, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=16, use_parallel_residual=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


MODELS: dict[str, Callable[[], Example]] = {
    "plain": plain,
    "gpt2": gpt2,
    "llama": llama,
    "qwen2": qwen2,
    "bert": bert,
    "opt": opt,
    "vit": vit,
    "gptj": gptj,
    "neox": neox,
}
"""Every architecture, by name."""
