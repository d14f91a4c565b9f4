"""What the cost model knows of a machine. All times in seconds, sizes in bytes."""

import dataclasses
import json
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from tpcompile.errors import HardwareError

Curve = tuple[tuple[int, float], ...]
"""(smallest dim of a matmul, fraction of the peak rate it reaches), ascending."""


@dataclass(frozen=True)
class Link:
    """How the devices of a ring reach one another."""

    bandwidth: float
    """Bytes/s that each device can send and receive at once, as a collective reaches it."""
    latency: float
    """Seconds of one hop."""
    startup: float = 0.0
    """Seconds a collective takes before the first hop."""


@dataclass(frozen=True)
class Hardware:
    """One device, the links inside a node and those between nodes."""

    name: str
    flops: Mapping[torch.dtype, float] = field(hash=False)
    """Peak matmul rate by dtype, FLOP/s."""
    memory_bandwidth: float
    """Bytes/s."""
    memory: float
    """Bytes a device has."""
    inside: Link
    """Links between the devices of one node."""
    between: Link | None = None
    """Links between nodes, per device; None: like those inside."""
    node: int = 8
    """Devices of one node."""
    launch: float = 0.0
    """Seconds an op takes at least, however small its tensors."""
    efficiency: Curve = ((1, 1.0),)
    source: str = ""
    """Where the numbers are from."""

    def matmul_rate(self, dtype: torch.dtype, side: float = math.inf) -> float:
        """Sustained FLOP/s of a matmul whose smallest dim is `side`."""
        peak = self.flops.get(dtype, self.flops[torch.float32])
        return peak * fraction_at(self.efficiency, side)

    def crosses(self, size: int, stride: int = 1) -> bool:
        """Whether a ring of `size` devices, `stride` apart, leaves its node."""
        return self.between is not None and size * stride > self.node

    def members(self, size: int, stride: int = 1) -> int:
        """Devices of such a ring that are in one node."""
        return max(1, min(size, self.node // stride))

    def bandwidth(self, size: int, stride: int = 1) -> float:
        """Bytes/s a device of such a ring sends.

        A ring that crosses nodes has one network link for each of its devices in a node, as NCCL
        lays one ring over each; what is inside the node is the upper limit.
        """
        if not self.crosses(size, stride):
            return self.inside.bandwidth
        assert self.between is not None
        return min(self.inside.bandwidth, self.members(size, stride) * self.between.bandwidth)

    def latency(self, size: int, rounds: int = 1, stride: int = 1) -> float:
        """Seconds of an empty collective that passes a ring of `size` devices `rounds` times."""
        if not self.crosses(size, stride):
            return self.inside.startup + rounds * (size - 1) * self.inside.latency
        assert self.between is not None
        nodes = -(-size // self.members(size, stride))
        inner, outer = size - nodes, nodes - 1
        hops = inner * self.inside.latency + outer * self.between.latency
        return max(self.inside.startup, self.between.startup) + rounds * hops

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile as JSON, for `hardware=path`."""
        fields = dataclasses.asdict(self)
        fields["flops"] = {str(k).removeprefix("torch."): v for k, v in self.flops.items()}
        Path(path).write_text(json.dumps(fields, indent=2) + "\n")


def fraction_at(curve: Curve, side: float) -> float:
    """The curve at `side`: linear in the logarithm between its points, flat beyond them.

    >>> fraction_at(((64, 0.25), (256, 0.75)), 128)
    0.5
    """
    if side <= curve[0][0]:
        return curve[0][1] * max(side, 1.0) / curve[0][0]
    for (low, a), (high, b) in pairwise(curve):
        if side <= high:
            return a + (b - a) * math.log(side / low) / math.log(high / low)
    return curve[-1][1]


def load(path: Path) -> Hardware:
    """The profile a JSON or TOML file describes: the fields of `Hardware` and `Link`.

    Raises:
        HardwareError: It is neither, or fields are missing, unknown or of another type.
    """
    text = path.read_text()
    try:
        fields = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        return _from_fields(fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        names = ", ".join(f.name for f in dataclasses.fields(Hardware))
        raise HardwareError(
            f"hardware={str(path)!r}",
            f"the file does not describe a machine: {error}",
            f"give the fields {names}; Hardware.save writes such a file",
        ) from error


def _from_fields(fields: dict[str, Any]) -> Hardware:
    fields = dict(fields)
    fields["flops"] = {getattr(torch, name): float(v) for name, v in fields["flops"].items()}
    fields["inside"] = Link(**fields["inside"])
    if fields.get("between") is not None:
        fields["between"] = Link(**fields["between"])
    if "efficiency" in fields:
        fields["efficiency"] = tuple((int(n), float(v)) for n, v in fields["efficiency"])
    if torch.float32 not in fields["flops"]:
        raise ValueError("flops has no float32")
    return Hardware(**fields)
