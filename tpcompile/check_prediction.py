"""Predicted and measured step times on gloo ranks: `python -m tpcompile.check_prediction`."""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tpcompile.calibrate import measured_profile, on_gloo_ranks
from tpcompile.errors import InputError
from tpcompile.predict import predict
from tpcompile.sharding import shard

_STEPS = 9


@dataclass(frozen=True)
class Size:
    """A Llama to be timed."""

    width: int
    layers: int
    batch: int
    seq: int

    def __str__(self) -> str:
        return f"width {self.width}, {self.layers} layers, {self.batch} x {self.seq} tokens"


SIZES = (Size(128, 2, 2, 64), Size(512, 2, 2, 128), Size(1024, 2, 2, 256))


@dataclass(frozen=True)
class Row:
    """One model on one number of ranks; seconds of forward and backward."""

    ranks: int
    size: str
    compute: float
    communication: float
    measured: float
    """The least of the steps."""
    slowest: float
    busy: float
    """CPU seconds of a step on one rank, the least: what a crowded machine does not stretch."""

    @property
    def error(self) -> float:
        """Predicted beside measured: 0.1 is ten percent too long."""
        return (self.compute + self.communication) / self.measured - 1


def check(ranks: Sequence[int] = (2, 4), sizes: Sequence[Size] = SIZES) -> list[Row]:
    """Calibrate, predict and measure on each number of gloo ranks."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for count in ranks:
            path = Path(folder) / f"{count}.json"
            on_gloo_ranks(_time_all, count, tuple(sizes), str(path))
            rows += [Row(**fields) for fields in json.loads(path.read_text())]
    return rows


def table_of(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    cells = [
        (
            row.ranks,
            row.size,
            f"{row.compute * 1e3:.1f}",
            f"{row.communication * 1e3:.1f}",
            f"{(row.compute + row.communication) * 1e3:.1f}",
            f"{row.measured * 1e3:.1f} to {row.slowest * 1e3:.1f}",
            f"{row.busy * 1e3:.1f}",
            f"{row.error:+.0%}",
        )
        for row in rows
    ]
    heads = [
        "ranks",
        "Llama",
        "compute ms",
        "traffic ms",
        "predicted ms",
        "measured ms",
        "CPU ms",
        "error",
    ]
    return tabulate(cells, heads, tablefmt="github", disable_numparse=True)


def _time_all(sizes: tuple[Size, ...], path: str) -> None:
    """On every rank: one profile, then each model."""
    profile = measured_profile()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    rows = []
    for size in sizes:
        model, inputs = _llama(size)
        shard(model, mesh, inputs, hardware=profile)
        times = predict(model.explain().program)  # type: ignore[operator]
        least, most, busy = _measured(model, inputs)
        rows.append(
            {
                "ranks": dist.get_world_size(),
                "size": str(size),
                "compute": times.compute,
                "communication": times.communication,
                "measured": least,
                "slowest": most,
                "busy": busy,
            }
        )
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(rows))


def _measured(model: nn.Module, inputs: dict[str, Any]) -> tuple[float, float, float]:
    """(least, most, least CPU) seconds of a forward and backward pass, all ranks together."""
    found, busy = [], []
    for attempt in range(_STEPS + 2):
        model.zero_grad(set_to_none=True)
        dist.barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        model(**inputs).loss.backward()
        if attempt >= 2:
            found.append(time.perf_counter() - begin)
            busy.append(time.process_time() - cpu)
    return min(found), max(found), min(busy)


def _llama(size: Size) -> tuple[nn.Module, dict[str, Any]]:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise InputError(
            "python -m tpcompile.check_prediction",
            "transformers is not installed, and the models that are timed are Hugging Face Llamas",
            'pip install "tpcompile[hf]"',
        ) from error
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=size.width,
        intermediate_size=size.width * 8 // 3,
        num_hidden_layers=size.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=4096,
        use_cache=False,
    )
    ids = torch.randint(0, config.vocab_size, (size.batch, size.seq))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tpcompile.check_prediction")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    print(table_of(check(parser.parse_args().ranks)))


if __name__ == "__main__":
    main()
