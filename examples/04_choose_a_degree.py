"""Ask which degree of tensor parallelism a model wants, without weights and without GPUs.

python examples/04_choose_a_degree.py [layers]

It takes a Llama of 8B's width with 4 of its 32 layers unless told otherwise.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tpcompile


def llama(layers: int) -> LlamaForCausalLM:
    """Llama-3-8B with so many layers, in bfloat16, without memory."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).bfloat16()


def main() -> None:
    """One micro-batch of 4096 tokens, on nodes of 8 A100s."""
    layers = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    ids = torch.zeros(1, 4096, dtype=torch.long, device="meta")
    advice = tpcompile.advise(
        llama(layers),
        {"input_ids": ids, "labels": ids},
        hardware="a100-nvlink",
        degrees=(1, 2, 4, 8, 16),
        gpus=64,
        optimizer="adamw-mixed",
    )
    print(advice)


if __name__ == "__main__":
    main()
