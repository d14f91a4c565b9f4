"""Plans of small models, each model captured once."""

import functools
from collections.abc import Callable

import torch
from models import MODELS, Example, scrambled
from torch import Tensor, nn

from tpcompile import pipeline
from tpcompile.clone import clone
from tpcompile.hardware import Hardware, Link
from tpcompile.planning import arguments_of, captured
from tpcompile.problem import Assignment
from tpcompile.profiles import DEFAULT
from tpcompile.program import Program

EAGER = Hardware(
    "eager", {torch.float32: 1e9}, memory_bandwidth=1e9, memory=1e9, inside=Link(1e12, 0.0)
)
"""A slow device with fast links: even the smallest weight is worth sharding."""

TINY = Hardware("tiny", {torch.float32: 1e9}, 1e9, 1e9, inside=Link(1e8, 0.0))
"""A device and links so slow that the smallest weights are worth sharding as large ones are."""


class Small(nn.Module):
    """A module from a function of itself and a tensor, and the modules that it reads."""

    def __init__(self, function: Callable[..., Tensor], **children: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x: Tensor) -> Tensor:
        """Whatever the function gives."""
        return self.function(self, x)


def small(function: Callable[..., Tensor], **children: nn.Module) -> Example:
    """A `Small` with random weights, and an input [2, 4, 8]."""
    torch.manual_seed(0)
    model = scrambled(Small(function, **children))
    return Example(model, {"x": torch.randn(2, 4, 8, dtype=torch.float64)})


def program_of(example: Example) -> Program:
    """The normalized program of an example's call."""
    args, kwargs = arguments_of(example.model, example.inputs)
    return captured(example.model, args, kwargs)


@functools.cache
def _program_of_model(name: str) -> Program:
    return program_of(MODELS[name]())


def planned(
    what: str | Example,
    tp: int = 2,
    sequence_parallel: bool | str = "auto",
    hardware: Hardware = DEFAULT,
) -> Program:
    """A model (or an architecture by name) with placements and collectives."""
    program = clone(_program_of_model(what)) if isinstance(what, str) else program_of(what)
    program.extra["stages"] = []
    return pipeline.plan(program, tp, sequence_parallel=sequence_parallel, hardware=hardware)


def assignment(program: Program) -> Assignment:
    """What was chosen for a planned program."""
    return program.extra["assignment"]
