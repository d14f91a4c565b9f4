"""What runs after sharding: the user's module, its forward replaced by emitted graphs."""

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from tpcompile.capture import flatten_inputs, holds, unflatten_output
from tpcompile.errors import TpcompileError
from tpcompile.parameters import local_parameter
from tpcompile.program import Program
from tpcompile.storage import ParamLayout


def call_block(model: nn.Module, path: str, graph: int, *inputs: Any) -> Any:
    """Call a block of the model, as the user's forward would: hooks and wrappers take part."""
    return model.get_submodule(path)(*inputs, tpcompile_graph=graph)


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
        return self.module.forward(*inputs, *[s.read(self.rank) for s in self.sources])


@dataclass
class Variant:
    """One capture of the model, planned and emitted: for one input structure and mode."""

    program: Program
    root: fx.GraphModule
    """Takes the model, then what `sources` read, then the input tensors."""
    sources: tuple[Source, ...]
    rank: int
    divisible: tuple[Any, ...]
    """Expressions of input sizes that the degree must divide."""
    constants: tuple[Tensor, ...] = ()

    def run(self, model: nn.Module, tensors: list[Tensor]) -> Any:
        """The user's output for flat input tensors."""
        read = [s.read(self.rank) for s in self.sources]
        outs = self.root.forward(model, *read, *self.constants, *tensors)
        n = self.program.n_outputs
        self._update(outs[n:], tensors)
        return unflatten_output(self.program.out_spec, list(outs[:n]))

    def _update(self, news: tuple[Tensor, ...], tensors: list[Tensor]) -> None:
        if not news:
            return
        inputs = dict(zip([p.name for p in self.program.placeholders("input")], tensors, strict=True))
        with torch.no_grad():
            for name, new in zip(self.program.updates, news, strict=True):
                target = inputs.get(name)
                if target is None:
                    target = self.owners[name].read(self.rank)
                target.copy_(new)

    owners: dict[str, Source] = field(default_factory=dict)
    """Placeholder name -> source, of buffers that the forward updates."""


@dataclass
class Runtime:
    """Everything a sharded model needs beside its parameters."""

    compile: Callable[[nn.Module, list[Tensor], Any, Any], Variant]
    """(model, flat tensors, args, kwargs) -> a variant for these inputs."""
    size: int
    forward: Callable[..., Any]
    """The model's own forward, for its signature."""
    variants: dict[Any, list[Variant]] = field(default_factory=dict)
    last: Variant | None = None

    def variant_for(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[Variant, list[Tensor]]:
        """The variant that fits these inputs, made now if there is none."""
        tensors, key = flatten_inputs(model, args, kwargs)
        key = (key, model.training)
        for variant in self.variants.setdefault(key, []):
            if self._fits(variant, tensors):
                self.last = variant
                return variant, tensors
        self.last = self.compile(model, tensors, args, kwargs)
        self.variants[key].append(self.last)
        return self.last, tensors

    def add(self, model: nn.Module, args: Any, kwargs: Any, variant: Variant) -> None:
        """Keep a variant made for these inputs."""
        _, key = flatten_inputs(model, args, kwargs)
        self.variants[(key, model.training)] = [variant]
        self.last = variant

    def _fits(self, variant: Variant, tensors: list[Tensor]) -> bool:
        if not holds(variant.program, tensors):
            return False
        if not variant.divisible:
            return True
        names = [p.name for p in variant.program.placeholders("input")]
        shapes = dict(zip(names, (t.shape for t in tensors), strict=True))
        values = {s: shapes[name][dim] for s, (name, dim) in variant.program.symbols.items()}
        return all(int(e.subs(values)) % self.size == 0 for e in variant.divisible)


RUNTIME = "_tpcompile_runtime"


class ShardedModule(nn.Module):
    """Mixed into the class of a sharded model; its forward runs the emitted graphs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the original forward, on this rank's part of the work."""
        runtime: Runtime = self.__dict__[RUNTIME]
        if torch.compiler.is_compiling():
            variant, tensors = runtime.last, _plain_inputs(runtime, args, kwargs)
            assert variant is not None
        else:
            variant, tensors = runtime.variant_for(self, args, kwargs)
        return variant.run(self, tensors)


def _plain_inputs(runtime: Runtime, args: Any, kwargs: Any) -> list[Tensor]:
    """The input tensors in capture order, found in a way torch.compile can trace."""
    assert runtime.last is not None
    names = runtime.last.program.extra["input_names"]
    given = dict(zip(runtime.last.program.extra["positional"], args, strict=False))
    given.update(kwargs)
    return [given[name] for name in names]


def replace_block_forward(block: nn.Module) -> list[LocalGraph]:
    """Make the block run local graphs; returns the list that the graphs are added to."""
    graphs = block.__dict__.get("_tpcompile_graphs")
    if graphs is not None:
        return graphs
    graphs = []

    def forward(self: nn.Module, *inputs: Any, tpcompile_graph: int | None = None) -> Any:
        if tpcompile_graph is None:
            raise TpcompileError(
                f"{type(self).__name__}: a block of a sharded model was called by itself",
                "its parameters are sharded, and only the whole model knows the plan",
                "call the model; tpcompile.full_state_dict gives weights for a single block",
            )
        return self.__dict__["_tpcompile_graphs"][tpcompile_graph](*inputs)

    block.__dict__["_tpcompile_graphs"] = graphs
    block.__dict__["forward"] = types.MethodType(forward, block)
    return graphs
