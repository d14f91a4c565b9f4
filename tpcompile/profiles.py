"""Profiles of known machines: data-sheet rates, and NCCL's own latencies.

Sources, dense rates (data sheets print twice as much for sparse ones):
NVIDIA A100 80GB data sheet (2021), H100 data sheet (2023), H200 data sheet (2024), HGX B200 data
sheet (2025); DGX user guides for the network links. float32 is the rate without TF32, which
PyTorch leaves off by default. Latencies: NCCL `src/graph/tuning.cc`, `baseLat` and `hwLat` of the
ring with the low-latency protocol: 6.6 us, and 0.6 (NVLink), 1.0 (PCIe) and 2.7 us (network) a hop.
"""

import os
from pathlib import Path

import torch

from tpcompile.errors import HardwareError
from tpcompile.hardware import Curve, Hardware, Link, load

_STARTUP = 6.6e-6
_LAUNCH = 4e-6
_INSIDE_SHARE = 0.8
"""Of a link's rate, what a ring inside a node reaches (nccl-tests: A100 230-240 of 300 GB/s)."""
_BETWEEN_SHARE = 0.5
"""Of a network link's rate, what a ring reaches with messages of tens of megabytes; an estimate,
as it depends on the switches: calibrate on the cluster to replace it."""

_TENSOR_CORES: Curve = tuple((n, round(0.75 * n / (n + 96), 3)) for n in (16, 64, 256, 1024, 4096))
"""Large matmuls reach 3/4 of the peak; a thin one fills part of its tiles of 128 x 128 to
128 x 256 and pays their ramp. The half-way point of 96 is an estimate after NVIDIA's "Matrix
Multiplication Background User's Guide" (tile quantization); calibrate to replace it."""


def _gpu(
    name: str,
    *,
    half: float,
    single: float,
    double: float,
    memory: float,
    bandwidth: float,
    link: float,
    network: float,
    hop: float = 0.6e-6,
) -> Hardware:
    """Rates in TFLOP/s, memory in GB, bandwidths in GB/s (links: one direction)."""
    flops = {torch.bfloat16: half * 1e12, torch.float16: half * 1e12}
    flops |= {torch.float32: single * 1e12, torch.float64: double * 1e12}
    return Hardware(
        name,
        flops,
        memory_bandwidth=bandwidth * 1e9,
        memory=memory * 1e9,
        inside=Link(link * 1e9 * _INSIDE_SHARE, hop, _STARTUP),
        between=Link(network * 1e9 * _BETWEEN_SHARE, 2.7e-6, _STARTUP),
        launch=_LAUNCH,
        efficiency=_TENSOR_CORES,
        source="data sheet; latencies from NCCL's tuning table; efficiency estimated",
    )


_CPU = Hardware(
    "cpu-gloo",
    {torch.float32: 60e9, torch.bfloat16: 30e9, torch.float16: 30e9, torch.float64: 30e9},
    memory_bandwidth=8e9,
    memory=16e9,
    inside=Link(1.5e9, 30e-6, 60e-6),
    node=64,
    launch=8e-6,
    efficiency=((8, 0.25), (32, 0.6), (128, 0.9), (512, 1.0)),
    source="one core a rank, gloo over loopback; calibrate for a real one",
)

PROFILES: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        _gpu("a100-nvlink", half=312, single=19.5, double=19.5, memory=80, bandwidth=2039,
             link=300, network=25),
        _gpu("h100-nvlink", half=989, single=67, double=67, memory=80, bandwidth=3350,
             link=450, network=50),
        _gpu("h200-nvlink", half=989, single=67, double=67, memory=141, bandwidth=4800,
             link=450, network=50),
        _gpu("b200-nvlink", half=2250, single=75, double=37, memory=180, bandwidth=8000,
             link=900, network=50),
        _gpu("a100-pcie", half=312, single=19.5, double=19.5, memory=80, bandwidth=1935,
             link=32, network=12.5, hop=1e-6),
        _gpu("h100-pcie", half=756, single=51, double=51, memory=80, bandwidth=2000,
             link=64, network=25, hop=1e-6),
        _CPU,
    )
}  # fmt: skip
"""Profile by name; nodes of 8 devices, 80 GB = 80e9 bytes."""

DEFAULT = PROFILES["h100-nvlink"]


def default_for(device: str = "") -> Hardware:
    """The profile of a device type: by the GPU's name where it is known, else h100-nvlink.

    A model sharded over CPU ranks is a rehearsal for GPUs, so it gets the plan it will have there.
    """
    if device != "cuda" or not torch.cuda.is_available():
        return DEFAULT
    found = torch.cuda.get_device_name().lower()
    pcie = "pcie" in found
    for chip in ("a100", "h100", "h200", "b200"):
        if chip in found:
            return PROFILES.get(f"{chip}-pcie" if pcie else f"{chip}-nvlink", DEFAULT)
    return DEFAULT


def hardware_for(wanted: "Hardware | str | os.PathLike[str] | None", device: str = "") -> Hardware:
    """The profile a user asks for: a `Hardware`, a name, a JSON or TOML file; None: the device's.

    Raises:
        HardwareError: No profile and no file has that name, or the file does not make a profile.
    """
    if wanted is None:
        return default_for(device)
    if isinstance(wanted, Hardware):
        return wanted
    if isinstance(wanted, str) and wanted in PROFILES:
        return PROFILES[wanted]
    path = Path(wanted)
    if path.is_file():
        return load(path)
    raise HardwareError(
        f"hardware={os.fspath(wanted)!r}",
        f"no file has that name, and the profiles are {', '.join(PROFILES)}",
        "use one of those, a Hardware, or a file that tpcompile.calibrate(path=...) wrote",
    )
