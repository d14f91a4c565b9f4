"""What `advise` found, as a table, as JSON and as a picture."""

import dataclasses
import json
import os
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from tpcompile.degrees import USABLE, Degree
from tpcompile.errors import InputError
from tpcompile.layout3d import Job, Layout

WORTH = 1.5
"""A doubling is worth it if the step gets this many times shorter: half of the ideal gain."""


@dataclass(frozen=True)
class Advice:
    """Which degree of tensor parallelism to use. `print(advice)` shows the table and the reason."""

    model: str
    degrees: tuple[Degree, ...]
    job: Job
    optimizer: str
    tokens: int
    """Tokens (samples, where inputs are not token ids) of the example inputs."""
    smallest: Layout | None
    """The fewest devices one copy of the model trains on; None: not even 64 and pipelines do."""
    layout: Layout | None
    """The fastest layout of `gpus` devices that fits."""
    gpus: int | None
    seconds: tuple[float, float]
    """Capture, and everything."""

    @property
    def first_fit(self) -> int | None:
        """The smallest degree at which a rank has room."""
        return next((d.size for d in self.degrees if d.fits(self.job.memory)), None)

    @property
    def last_worth(self) -> int:
        """The largest degree up to which every larger one still gave half of its gain."""
        last = self.degrees[0]
        for degree in self.degrees[1:]:
            wanted = 1 + (WORTH - 1) * (degree.size / last.size - 1)
            if last.step / degree.step < wanted:
                break
            last = degree
        return last.size

    @property
    def recommended(self) -> int:
        """The degree to use: that of the layout, else the first that fits, else the node's."""
        best = self.layout or self.smallest
        if best is not None:
            return best.tp
        return self.first_fit or max(self._inside(), default=self.degrees[0].size)

    def tokens_per_gpu(self, degree: Degree) -> float:
        """Tokens/s for each device."""
        return self.tokens / degree.step / degree.size

    def efficiency(self, degree: Degree) -> float:
        """Throughput for each device beside the smallest degree's."""
        return self.tokens_per_gpu(degree) / self.tokens_per_gpu(self.degrees[0])

    def _inside(self) -> list[int]:
        return [d.size for d in self.degrees if not d.crosses_node]

    @property
    def warnings(self) -> list[str]:
        """What not to do."""
        found = []
        crossing = [d.size for d in self.degrees if d.crosses_node]
        if crossing:
            node, hardware = self.job.hardware.node, self.job.hardware
            inside = hardware.inside.bandwidth / 1e9
            outside = hardware.bandwidth(crossing[0]) / 1e9
            found.append(
                f"degrees {_listed(crossing)} cross the node of {node} devices: a collective runs "
                f"at {outside:.0f} GB/s instead of {inside:.0f}, and a hop takes "
                f"{hardware.between.latency * 1e6:.1f} us instead of "  # type: ignore[union-attr]
                f"{hardware.inside.latency * 1e6:.1f}"
            )
        if self.gpus is not None and self.layout is None:
            found.append(f"no layout of exactly {self.gpus} devices fits")
        return found

    @property
    def reasons(self) -> list[str]:
        """Why the recommendation is what it is."""
        return [*self._why_degree(), *self._why_pipeline(), *self._why_data()]

    def _why_degree(self) -> list[str]:
        room = f"{USABLE:.0%} of {self.job.memory / 1e9:.0f} GB"
        first, inside = self.first_fit, self._inside()
        if first == 1:
            lines = [f"the model fits one device ({room}): tensor parallelism is not needed for it"]
        elif first is None:
            least = min(d.memory for d in self.degrees)
            lines = [f"no degree alone fits: a rank needs at least {least / 1e9:.0f} GB of {room}"]
        else:
            lines = [f"the first degree that fits ({room}) is {first}"]
        lines.append(
            f"up to degree {self.last_worth} every step keeps at least half of the gain it could "
            "give"
        )
        if first is not None and inside and first > max(inside):
            lines.append(
                f"degree {first} would fit but leaves the node: tensor parallelism sends every "
                "block's activations several times, pipeline stages send them once"
            )
        return lines

    def _why_pipeline(self) -> list[str]:
        best = self.layout or self.smallest
        if best is None:
            return ["nothing fits: use more devices, a smaller micro-batch or a shorter sequence"]
        if best.pp == 1:
            return [f"TP {best.tp} alone holds the model, so no pipeline stages"]
        degree = next(d for d in self.degrees if d.size == best.tp)
        return [
            f"TP {best.tp} stays inside the node ({degree.exposed:.0%} of its step is traffic), "
            f"and {best.pp} pipeline stages divide the {self.job.blocks} blocks beyond it "
            f"({best.bubble:.0%} of the step is bubble with {best.microbatches} micro-batches)"
            if not degree.crosses_node
            else f"TP {best.tp} x PP {best.pp}: with less, nothing fits or the bubble is larger"
        ]

    def _why_data(self) -> list[str]:
        smallest = self.smallest
        if smallest is None:
            return []
        one = "one device" if smallest.gpus == 1 else f"every {smallest.gpus} devices"
        return [
            f"use data parallelism for all further devices, one replica on {one}: it sends "
            "gradients once a step, behind the backward pass"
        ]

    def __str__(self) -> str:
        head = (
            f"{self.model} on {self.job.hardware.name} (nodes of {self.job.hardware.node}), "
            f"{self.tokens} tokens a micro-batch, {self.optimizer}, {self.job.blocks} blocks"
        )
        lines = [head, self._table()]
        if self.smallest is not None:
            lines.append(f"smallest: {self.smallest} = {self._layout_line(self.smallest)}")
        if self.layout is not None:
            lines.append(f"best of {self.gpus}: {self.layout} = {self._layout_line(self.layout)}")
        lines.append(f"recommended: tensor parallel degree {self.recommended}")
        lines += [f"- {reason}" for reason in self.reasons]
        lines += [f"warning: {warning}" for warning in self.warnings]
        capture, everything = self.seconds
        lines.append(
            f"({capture:.0f} s to capture the model, {everything - capture:.0f} s to plan)"
        )
        return "\n".join(lines)

    def _layout_line(self, layout: Layout) -> str:
        tokens = layout.microbatches * layout.dp * self.tokens / layout.step / layout.gpus
        return (
            f"{layout.gpus} devices, {layout.memory / 1e9:.0f} GB each, {tokens:.0f} tokens/s a "
            f"device, bubble {layout.bubble:.0%}"
        )

    def _table(self) -> str:
        rows = [
            (
                d.size,
                f"{d.memory / 1e9:.1f}" + ("" if d.fits(self.job.memory) else " no"),
                f"{d.times.compute * 1e3:.1f}",
                f"{d.times.communication * 1e3:.1f}",
                f"{d.step * 1e3:.1f}",
                f"{self.tokens_per_gpu(d):.0f}",
                f"{self.efficiency(d):.0%}",
                f"{d.exposed:.0%}",
                "yes" if d.sequence_parallel else "no",
                _length(d.longest),
                _length(d.longest_without),
                "crosses node" if d.crosses_node else "",
            )
            for d in self.degrees
        ]
        return tabulate(
            rows,
            ["TP", "GB/GPU", "compute ms", "traffic ms", "step ms", "tokens/s/GPU", "efficiency",
             "exposed", "SP", "longest", "without SP", ""],
            disable_numparse=True,
            stralign="right",
        )  # fmt: skip

    def to_json(self) -> str:
        """Everything the table shows, numbers in bytes and seconds."""
        return json.dumps(
            {
                "model": self.model,
                "hardware": self.job.hardware.name,
                "memory": self.job.memory,
                "optimizer": self.optimizer,
                "tokens": self.tokens,
                "degrees": [self._fields(d) for d in self.degrees],
                "first_fit": self.first_fit,
                "last_worth": self.last_worth,
                "recommended": self.recommended,
                "smallest": _fields(self.smallest),
                "layout": _fields(self.layout),
                "reasons": self.reasons,
                "warnings": self.warnings,
            },
            indent=2,
        )

    def _fields(self, degree: Degree) -> dict[str, Any]:
        more = {
            "memory": degree.memory,
            "fits": degree.fits(self.job.memory),
            "step": degree.step,
            "tokens_per_gpu": self.tokens_per_gpu(degree),
            "efficiency": self.efficiency(degree),
            "exposed": degree.exposed,
        }
        return {**dataclasses.asdict(degree), **more}

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw memory and throughput against degree.

        Raises:
            InputError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure  # type: ignore[import-not-found]
        except ImportError as error:
            raise InputError(
                f"advise(...).plot({os.fspath(path)!r})",
                "matplotlib is not installed",
                "pip install matplotlib, or use to_json() and another tool",
            ) from error
        figure = Figure(figsize=(9, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        sizes = [str(d.size) for d in self.degrees]
        left.bar(sizes, [d.state / 1e9 for d in self.degrees], label="state")
        left.bar(
            sizes, [d.activations / 1e9 for d in self.degrees],
            bottom=[d.state / 1e9 for d in self.degrees], label="activations",
        )  # fmt: skip
        left.axhline(USABLE * self.job.memory / 1e9, color="black", linestyle="--", label="usable")
        left.set(xlabel="degree", ylabel="GB per device")
        left.legend()
        right.plot(sizes, [self.tokens_per_gpu(d) for d in self.degrees], marker="o")
        right.set(xlabel="degree", ylabel="tokens/s per device", ylim=(0, None))
        figure.suptitle(f"{self.model} on {self.job.hardware.name}")
        figure.savefig(path)


def _fields(layout: Layout | None) -> dict[str, Any] | None:
    return None if layout is None else {**dataclasses.asdict(layout), "gpus": layout.gpus}


def _length(tokens: int | None) -> str:
    return "-" if tokens is None else str(tokens)


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))
