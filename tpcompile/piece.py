"""One graph of Dynamo's, sharded: what runs in its place on this rank."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from tpcompile.dynamo_graph import Ends
from tpcompile.parameters import local_parameter
from tpcompile.program import Program
from tpcompile.registry import Registry
from tpcompile.storage import ParamLayout

Compiled = Callable[..., Any]


@dataclass(frozen=True)
class Place:
    """Where a sharded parameter is."""

    owner: nn.Module
    attr: str
    layout: ParamLayout

    def parameter(self) -> Tensor:
        """What is there; as an attribute it would be whole, in a forward."""
        registry = self.owner._parameters
        assert isinstance(registry, Registry)
        value = registry.shards.get(self.attr, registry.traced(self.attr))
        assert value is not None
        return value

    def read(self, rank: int) -> Tensor:
        """This rank's part, without padding."""
        return local_parameter(self.parameter(), self.layout, rank)


@dataclass(frozen=True)
class Runnable:
    """A localised program, compiled, and where its placeholders come from."""

    compiled: Compiled
    reads: tuple[Callable[[tuple[Any, ...]], Any], ...]
    """Of each placeholder: its value for the arguments of a call."""
    updates: tuple[int, ...]
    """Arguments that get new values: buffers and inputs that the graph writes to."""
    ends: Ends
    n_outputs: int
    device: str

    def __call__(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The outputs of Dynamo's graph."""
        with ExitStack() as stack:
            if torch.is_autocast_enabled(self.device):  # the graph says itself what is cast
                stack.enter_context(torch.autocast(self.device, enabled=False))
            outs = self.compiled(*[read(args) for read in self.reads])
        with torch.no_grad():
            for i, new in zip(self.updates, outs[self.n_outputs :], strict=True):
                args[i].copy_(new)
        tensors = iter(outs[: self.n_outputs])
        return tuple(next(tensors) if f is None else f(*args) for f in self.ends.outputs)


def runnable(
    program: Program,
    ends: Ends,
    places: Mapping[str, Place],
    compile_graph: Callable[[fx.Graph, bool], Compiled],
    device: str,
) -> Runnable:
    """The runnable form of a localised program whose blocks have not been split off.

    Args:
        program: Localised.
        ends: Of the graph that it was lowered from.
        places: Name of a parameter -> where it is read.
        compile_graph: (graph, whether sizes vary) -> what runs.
        device: Type of the mesh's devices.
    """
    reads = []
    for node in list(program.placeholders()):
        leaf = program.leaves[node.name]
        if not node.users and leaf.kind != "input":
            program.graph.erase_node(node)
        elif leaf.kind == "parameter":
            reads.append(_from_place(places[leaf.name], program.extra["axis"][2]))
        elif leaf.kind == "constant":
            reads.append(lambda args, value=leaf.tensor: value)
        elif node.name in ends.carriers:
            reads.append(_carried(ends.carriers[node.name], device))
        else:
            reads.append(lambda args, i=ends.arguments[node.name]: args[i])
    return Runnable(
        compile_graph(program.graph, bool(program.symbols)),
        tuple(reads),
        tuple(ends.arguments[name] for name in program.updates),
        ends,
        program.n_outputs,
        device,
    )


def run_whole(gm: fx.GraphModule, parameters: Mapping[int, tuple[nn.Module, str]]) -> Compiled:
    """Dynamo's graph as it is, on whole parameters.

    Args:
        gm: The graph.
        parameters: Argument -> (module, attribute), for those that are parameters.
    """

    def run(*args: Any) -> Any:
        given = list(args)
        for i, (module, attr) in parameters.items():
            held = module._parameters
            given[i] = held.whole(attr) if isinstance(held, Registry) else held[attr]
        return gm.forward(*given)

    return run


def kinds_of(inputs: list[Any]) -> str:
    """Types and shapes of what is no parameter."""
    tensors = (t for t in inputs if isinstance(t, Tensor) and not isinstance(t, nn.Parameter))
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)


def _from_place(place: Place, rank: int) -> Callable[[tuple[Any, ...]], Tensor]:
    return lambda args: place.read(rank)


def _carried(i: int, device: str) -> Callable[[tuple[Any, ...]], Tensor]:
    return lambda args: torch.empty((1, args[i]), dtype=torch.uint8, device=device)
