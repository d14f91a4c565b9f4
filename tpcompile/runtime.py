"""What runs after sharding: the user's module, its forward replaced by emitted graphs."""

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tpcompile.errors import TpcompileError
from tpcompile.parameters import local_parameter
from tpcompile.program import Program
from tpcompile.storage import ParamLayout

GRAPHS = "_tpcompile_graphs"
"""Attribute of a block module: its local graphs, by number."""


def call_block(model: nn.Module, path: tuple[str, ...], graph: int, *inputs: Any) -> Any:
    """Call a block of the model, as the user's forward would: hooks and wrappers take part.

    The number of the block's graph travels with the call, so that a checkpoint runs the same one
    again; by position, as reentrant checkpoints take no keywords.
    """
    block = model
    for name in path:
        block = getattr(block, name)
    return block(*inputs, graph)


@dataclass(frozen=True)
class Source:
    """Where a graph reads one parameter or buffer from, each time it runs."""

    owner: nn.Module
    attr: str
    layout: ParamLayout | None
    """None for a buffer or an unsharded parameter."""

    def read(self, rank: int) -> Tensor:
        """This rank's part; read anew each time because FSDP swaps the parameter."""
        value = getattr(self.owner, self.attr)
        return value if self.layout is None else local_parameter(value, self.layout, rank)


@dataclass(frozen=True)
class LocalGraph:
    """A graph and the parameters it reads."""

    module: fx.GraphModule
    sources: tuple[Source, ...]
    rank: int

    def __call__(self, *inputs: Any) -> Any:
        """The block's outputs on this rank."""
        return self.module.forward(*inputs, *[s.read(self.rank) for s in self.sources])


@dataclass
class Variant:
    """One capture of the model, planned and emitted: for one input structure and mode."""

    program: Program
    root: fx.GraphModule
    """Takes the model, then what `sources` read, then constants, then the input tensors."""
    sources: tuple[Source, ...]
    rank: int
    fits: Callable[..., bool]
    """(*input tensors) -> whether it is made for these sizes."""
    constants: tuple[Tensor, ...] = ()
    owners: dict[str, Source] = field(default_factory=dict)
    """Placeholder name -> source, of buffers that the forward updates."""
    mesh: DeviceMesh | None = None
    """The axis, where outputs leave in pieces."""

    def run(self, model: nn.Module, tensors: list[Tensor], caches: Sequence[Any] = ()) -> Any:
        """The user's output for flat input tensors; the call's caches are brought up to date."""
        read = [s.read(self.rank) for s in self.sources]
        outs = self.root.forward(model, *read, *self.constants, *tensors)
        n = self.program.n_outputs
        if len(outs) > n:
            self._update(outs[n:], tensors)
        return self.program.out_spec.rebuild(self._joined(list(outs[:n])), caches, tensors)

    def _joined(self, outs: list[Any]) -> list[Any]:
        """The outputs, pieces as DTensors."""
        split: dict[int, int] = self.program.extra["split_outputs"]
        if split:
            tensors = [i for i, out in enumerate(outs) if isinstance(out, Tensor)]
            for number, dim in split.items():
                i = tensors[number]
                outs[i] = DTensor.from_local(outs[i], self.mesh, [Shard(dim)], run_check=False)
        return outs

    def _update(self, news: tuple[Tensor, ...], tensors: list[Tensor]) -> None:
        names = [node.name for node in self.program.placeholders("input")]
        inputs = dict(zip(names, tensors, strict=True))
        with torch.no_grad():
            for name, new in zip(self.program.updates, news, strict=True):
                target = inputs.get(name)
                if target is None:
                    target = self.owners[name].read(self.rank)
                target.copy_(new)


def replace_block_forward(block: nn.Module) -> list[LocalGraph]:
    """Make the block run local graphs; returns the list that the graphs are added to."""
    graphs = block.__dict__.get(GRAPHS)
    if graphs is not None:
        return graphs
    graphs = []

    def forward(self: nn.Module, *inputs: Any) -> Any:
        number = inputs[-1] if inputs else None
        if type(number) is not int:
            raise TpcompileError(
                f"{type(self).__name__}: a block of a sharded model was called by itself",
                "its parameters are sharded, and only the whole model knows the plan",
                "call the model; tpcompile.full_state_dict gives weights for a single block",
            )
        return self.__dict__[GRAPHS][number](*inputs[:-1])

    block.__dict__[GRAPHS] = graphs
    block.__dict__["forward"] = types.MethodType(forward, block)
    return graphs
