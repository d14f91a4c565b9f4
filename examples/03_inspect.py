"""Read the plan of Llama-3-8B on 8 GPUs: no GPUs, no weights, no ranks.

python examples/03_inspect.py [folder for the page, default: a temporary one]
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tpcompile

LLAMA_3_8B = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
    rope_theta=500000.0,
)  # fmt: skip


def main(folder: Path) -> None:
    """Print totals, one reason and one line of the graph; write the page."""
    # Parameters on the meta device have shapes and no memory.
    with torch.device("meta"):
        model = LlamaForCausalLM(LLAMA_3_8B).to(torch.bfloat16)
        ids = torch.zeros(1, 4096, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}

    plan = tpcompile.explain(model, inputs, tp=8, hardware="h100-nvlink")
    print(plan)

    # Why is this weight split the way it is, and what would the alternatives have cost?
    print("\nwhy model.layers.0.self_attn.o_proj.weight:")
    print(plan.why("model.layers.0.self_attn.o_proj.weight"))

    # The graph of one block: what is P or split, and where a collective mends it.
    print("\ncollectives of the first block:")
    for line in tpcompile.dump(plan, block="model.layers.0").splitlines():
        if "= all_reduce" in line or "= reduce_scatter" in line or "= all_gather" in line:
            print(" ", line.strip())

    # All of it as a page to browse, and the plan as a file that shard(plan=) takes.
    tpcompile.dump(plan, "html", file=folder / "llama.html")
    plan.plan.save(folder / "llama.json")
    print(f"\nOK: {folder / 'llama.html'} and llama.json are written")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
