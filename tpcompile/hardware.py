"""What the cost model knows of a machine. All times in seconds, sizes in bytes."""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Hardware:
    """One device and the links of one mesh axis.

    Peak rates are data-sheet numbers; `efficiency` scales them to what large kernels reach.
    """

    name: str
    flops: dict[torch.dtype, float] = field(hash=False)
    """Peak matmul rate by dtype, FLOP/s."""
    memory_bandwidth: float
    """Bytes/s."""
    link_bandwidth: float
    """Bytes/s each device can send and receive at once."""
    latency: float
    """Seconds a collective takes on an empty tensor."""
    efficiency: float = 0.7

    def matmul_rate(self, dtype: torch.dtype) -> float:
        """Sustained FLOP/s of a large matmul in `dtype`."""
        peak = self.flops.get(dtype, self.flops[torch.float32])
        return peak * self.efficiency


def _gpu(name: str, half: float, single: float, memory: float, link: float) -> Hardware:
    flops = {torch.bfloat16: half, torch.float16: half, torch.float32: single}
    flops[torch.float64] = single / 2
    return Hardware(name, flops, memory, link, latency=6e-6)


PROFILES = {
    # NVIDIA data sheets: dense tensor-core bf16 and TF32, HBM rate, NVLink rate per direction.
    "a100-nvlink": _gpu("a100-nvlink", 312e12, 156e12, 2.04e12, 300e9),
    "h100-nvlink": _gpu("h100-nvlink", 989e12, 494e12, 3.35e12, 450e9),
    "h200-nvlink": _gpu("h200-nvlink", 989e12, 494e12, 4.8e12, 450e9),
}
DEFAULT = PROFILES["h100-nvlink"]
