"""Train one Llama twice, on one device and on two ranks, and compare the two.

python examples/01_quickstart.py
torchrun --nproc-per-node 2 examples/01_quickstart.py
"""

import copy
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import tpcompile

TEXT = Path(__file__).parent / "data" / "locks.txt"
STEPS, BATCH, LENGTH = 30, 4, 128
TOLERANCE = 1e-4
"""Both runs are in float64, but Llama's norms round to float32 whatever the model, and AdamW makes
about 1e-6 of that in a weight. With norms in float64 the two are 1e-13 apart."""


def main() -> None:
    """Shard, train, print, compare."""
    size = int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    single = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=LENGTH,
        )
    ).double()
    batches = batches_of(TEXT.read_bytes())

    model = copy.deepcopy(single)
    ids = batches[0]
    model = tpcompile.shard(model, mesh, example_inputs={"input_ids": ids, "labels": ids})

    expected = train(single, batches)
    losses = train(model, batches)

    weights = tpcompile.full_state_dict(model)
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == 0:
        print(model.plan)
        report(expected, losses, single.state_dict(), weights)


def batches_of(text: bytes) -> list[Tensor]:
    """STEPS batches of byte tokens, [BATCH, LENGTH] each, the same on every rank."""
    tokens = torch.tensor(list(text))
    starts = torch.randint(
        len(tokens) - LENGTH, (STEPS, BATCH), generator=torch.Generator().manual_seed(0)
    )
    return [torch.stack([tokens[i : i + LENGTH] for i in row]) for row in starts.tolist()]


def train(model: nn.Module, batches: list[Tensor]) -> list[float]:
    """The loss before each step. Nothing here knows whether the model is sharded."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def report(
    expected: list[float],
    losses: list[float],
    expected_weights: dict[str, Tensor],
    weights: dict[str, Tensor],
) -> None:
    """Print both loss curves and the largest differences; exit with 1 if one is too large."""
    print("\nstep   one device    sharded       difference")
    for step, (want, loss) in enumerate(zip(expected, losses, strict=True)):
        if step % 5 == 0 or step == STEPS - 1:
            print(f"{step:4}   {want:10.6f}    {loss:10.6f}    {abs(want - loss):.1e}")
    loss_error = max(abs(a - b) for a, b in zip(expected, losses, strict=True))
    if weights.keys() != expected_weights.keys():
        sys.exit(f"FAILED: other names: {sorted(weights.keys() ^ expected_weights.keys())}")
    errors = {name: (weights[name] - w).abs().max().item() for name, w in expected_weights.items()}
    worst = max(errors, key=errors.__getitem__)
    print(f"\nlargest difference: loss {loss_error:.1e}, weights {errors[worst]:.1e} in {worst}")
    if not max(loss_error, errors[worst]) < TOLERANCE:
        sys.exit(f"FAILED: more than {TOLERANCE:.0e} apart after {STEPS} steps")
    print(f"OK: the same within {TOLERANCE:.0e} after {STEPS} steps")


if __name__ == "__main__":
    if "RANK" not in os.environ:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        os.execv(sys.executable, [sys.executable, *launch, __file__, *sys.argv[1:]])
    main()
