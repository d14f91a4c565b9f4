"""Train a small model on two ranks, then let both generate: text is printed as it comes.

python examples/07_generate.py
torchrun --nproc-per-node 2 examples/07_generate.py
"""

import copy
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

import tpcompile

TEXT = Path(__file__).parent / "data" / "locks.txt"
STEPS, BATCH, LENGTH = 40, 8, 64
TOKENS = 64
"""How many bytes are generated."""


class Printer(BaseStreamer):
    """Prints bytes on rank 0 as soon as all ranks have chosen them."""

    def put(self, value: Tensor) -> None:
        """The prompt first, then one token after another."""
        if dist.get_rank() == 0:
            print(bytes(value.flatten().tolist()).decode("latin-1"), end="", flush=True)

    def end(self) -> None:
        """The last token has come."""
        if dist.get_rank() == 0:
            print("\n")


def main() -> None:
    """Shard, train a little, generate, compare with the model on one device."""
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    single = LlamaForCausalLM(config)
    text = torch.tensor(list(TEXT.read_bytes()))
    ids = text[: BATCH * LENGTH].view(BATCH, LENGTH)
    example = {"input_ids": ids, "labels": ids, "use_cache": False}
    model = tpcompile.shard(copy.deepcopy(single), mesh, example)
    train(model, text)

    model.eval()
    prompt = torch.tensor([list(b"The lock ")])
    model.generate(prompt, max_new_tokens=TOKENS, do_sample=True, streamer=Printer())
    found = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False)

    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(prompt, cache=cache, use_cache=True)
    weights = tpcompile.full_state_dict(model)
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == 0:
        single.load_state_dict(weights)
        report(single.eval(), model, prompt, found, cache)


def train(model: nn.Module, text: Tensor) -> None:
    """Some steps on bytes of the text."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator)
        ids = torch.stack([text[i : i + LENGTH] for i in starts.tolist()])
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def report(
    single: nn.Module, model: nn.Module, prompt: Tensor, found: Tensor, cache: DynamicCache
) -> None:
    """Print the graphs and the cache of a rank; exit with 1 where one device says another thing."""
    print("captured:", *model.captures, sep="\n  ")
    print("keys of a layer on this rank:", list(cache.layers[0].keys.shape))
    wanted = single.generate(prompt, max_new_tokens=TOKENS, do_sample=False)
    if not torch.equal(found, wanted):
        sys.exit(f"FAILED: {found.tolist()} instead of {wanted.tolist()}")
    print(f"OK: {TOKENS} greedy tokens are those of one device")


if __name__ == "__main__":
    if "RANK" not in os.environ:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        os.execv(sys.executable, [sys.executable, *launch, __file__, *sys.argv[1:]])
    main()
