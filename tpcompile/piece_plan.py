"""How one graph of Dynamo's becomes what runs in its place."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from tpcompile import pipeline
from tpcompile.agreement import agree, digest, draws_random, meet, tensor_digest
from tpcompile.backend_text import PieceText
from tpcompile.clone import clone
from tpcompile.dynamo_graph import Ends, lower
from tpcompile.errors import InputError, TpcompileError
from tpcompile.home import Home, owner_of
from tpcompile.piece import Compiled, Place, Runnable, runnable
from tpcompile.pins import PlanLike, pins_from_layouts, pins_from_plan
from tpcompile.planning import block_paths, check_rules
from tpcompile.problem import Pin
from tpcompile.program import Program
from tpcompile.size_check import python_text
from tpcompile.torch_private import compiler_for, graph_end


@dataclass
class Shared:
    """What all graphs of one backend share."""

    mesh: DeviceMesh
    """The axis."""
    inner: str
    options: Mapping[str, Any]
    """Of `pipeline.plan`."""
    plan: PlanLike
    strict: bool
    optimizer: torch.optim.Optimizer | None
    home: Home | None = None
    pins: dict[str, Pin] = field(default_factory=dict)

    def home_for(self, model: nn.Module) -> Home:
        """The model as a home, after everything that can be wrong with it."""
        home = Home(model, self.mesh, self.optimizer)
        self.pins = pins_from_plan(model, self.plan)
        return home

    def home_of(self, parameters: list[nn.Parameter]) -> Home:
        """The model that holds the parameters of a graph."""
        if self.home is None:
            return self.home_for(owner_of(parameters))
        known = set(map(id, self.home.traced().values()))
        if not known.issuperset(map(id, parameters)):
            raise InputError(
                f"shard a graph of {type(self.home.model).__name__}",
                "it reads parameters that are not of this model",
                "make a backend of its own for every model: tpcompile.backend(mesh, model=model)",
            )
        return self.home

    def compile_graph(self, gm: fx.GraphModule, dynamic: bool) -> Compiled:
        """A local graph, compiled at its first call."""
        if self.inner == "eager":
            return gm.forward
        return torch.compile(gm, backend=self.inner, fullgraph=True, dynamic=dynamic)


class Piece:
    """One graph of Dynamo's, and its variants: one for every choice of what is trained."""

    def __init__(self, shared: Shared, number: int, gm: fx.GraphModule, inputs: list[Any]) -> None:
        self.shared, self.number, self.end = shared, number, graph_end(gm)
        self.planned: Program | None = None
        parameters = [t for t in inputs if isinstance(t, nn.Parameter)]
        if not parameters:
            self.run: Compiled = compiler_for(shared.inner)(gm, inputs)
            return
        self.home: Home = shared.home_of(parameters)
        self.asked = f"compile graph {self.number} of {type(self.home.model).__name__}"
        self.variants: dict[tuple[bool, ...], Runnable] = {}
        with torch.inference_mode(False):
            self._first(gm, inputs)
        self.run = self._run

    def _first(self, gm: fx.GraphModule, inputs: list[Any]) -> None:
        """Plan with all ranks, place what is new, and compile."""

        def decide() -> tuple[Program, Program, Ends]:
            leaves = self.home.leaves()
            names = {i: leaves[id(t)] for i, t in enumerate(inputs) if id(t) in leaves}
            kind = self.shared.mesh.device_type
            autocast = (
                (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
            )
            program, ends = lower(gm, names, self.home.paths(), autocast)
            program.extra["model"] = type(self.home.model).__name__
            program.extra["capture_seconds"] = 0.0
            program.extra["block_paths"] = block_paths(self.home.model)
            pipeline.run(program, pipeline.NORMALIZE)
            normal = clone(program)
            return self._plan(program), normal, ends

        group = self.shared.mesh.get_group()
        meet(group, self.asked, _kinds(inputs))
        program, self.normal, self.ends = agree(
            self.asked,
            decide,
            lambda made: self._prints(made[0], made[2], inputs),
            lambda made: made[:1],
            group,
        )
        self.planned = clone(program)
        self._localize(program)
        layouts = program.extra["layouts"]
        self.home.place(layouts)
        self.shared.home = self.home
        self.names = list(layouts)
        self._keep(program)

    def _run(self, *args: Any) -> tuple[Any, ...]:
        self.home.settle()
        variant = self.variants.get(self._flags())
        if variant is None:
            variant = self._for_trained()
        return variant(args)

    def _flags(self) -> tuple[bool, ...]:
        """Which of its parameters are trained; Dynamo does not see that of shards."""
        return tuple(self.places[name].parameter().requires_grad for name in self.names)

    def _for_trained(self) -> Runnable:
        """A variant for parameters that are frozen, or trained, since the graph was traced."""
        flags = dict(zip(self.names, self._flags(), strict=True))

        def decide() -> Program:
            program = clone(self.normal)
            for node in program.placeholders("parameter"):
                val = node.meta["val"]
                node.meta["val"] = val.detach().requires_grad_(
                    flags[program.leaves[node.name].name]
                )
            return self._plan(program)

        group = self.shared.mesh.get_group()
        with torch.inference_mode(False):
            meet(group, self.asked, f"trained: {[n for n, on in flags.items() if on]}")
            program = agree(
                self.asked,
                lambda: self._plan(clone(self.normal)),
                lambda p: {"plan": f";{digest(p)}"},
                lambda p: [p],
                group,
            )
            self._localize(program)
            return self._keep(program)

    def _plan(self, program: Program) -> Program:
        """Decide, with parameters that have a place where they are."""
        shared, placed = self.shared, self.home.layouts
        for node in program.placeholders("parameter"):
            name = program.leaves[node.name].name
            if name in placed:  # Dynamo does not see what is trained of shards
                trained = Place(*self.home.source(name), placed[name]).parameter().requires_grad
                node.meta["val"] = node.meta["val"].detach().requires_grad_(trained)
        read = {program.leaves[n.name].name for n in program.placeholders("parameter")}
        pins = {name: pin for name, pin in shared.pins.items() if name in read}
        pins |= pins_from_layouts({n: o for n, o in self.home.pinned().items() if n in read})
        pipeline.plan(program, shared.mesh.size(), pins=pins, **shared.options)
        check_rules(program, strict=shared.strict)
        return program

    def _localize(self, program: Program) -> None:
        mesh = self.shared.mesh
        axis = (mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())
        pipeline.local(program, axis)
        _check_sizes(program, mesh.size())

    def _keep(self, program: Program) -> Runnable:
        """Compile a localised program whose parameters are placed."""
        layouts = self.home.layouts
        self.places = {n: Place(*self.home.source(n), layouts[n]) for n in self.names}
        made = runnable(
            program, self.ends, self.places, self.shared.compile_graph, self.shared.mesh.device_type
        )
        return self.variants.setdefault(self._flags(), made)

    def _prints(self, program: Program, ends: Ends, inputs: list[Any]) -> dict[str, str]:
        """What must be equal on all ranks; of values only those not seen before."""
        found = {"mode": f";{[module.training for module in self.home.model.modules()]}"}
        read = {program.leaves[n.name].name for n in program.placeholders("parameter")}
        for name, parameter in self.home.traced().items():
            if name in read - self.home.layouts.keys():
                found[f"parameter {name}"] = tensor_digest(parameter)
        if self.number == 0:
            for name, i in ends.arguments.items():
                if program.leaves[name].kind == "input":
                    found[f"input {program.leaves[name].name}"] = tensor_digest(inputs[i])
        if draws_random(program):
            found["random seed"] = f"seed {torch.initial_seed()}"
        return {**found, "plan": f";{digest(program)}"}

    def text(self) -> PieceText:
        """For `explain`."""
        return PieceText(self.number, *self.end, self.planned, len(getattr(self, "variants", ())))


def _kinds(inputs: list[Any]) -> str:
    tensors = (t for t in inputs if isinstance(t, Tensor))
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)


def _check_sizes(program: Program, degree: int) -> None:
    """Let Dynamo guard on what the plan assumes of sizes: that the degree divides some."""
    sizes = {symbol: f"sizes[{i}]" for i, symbol in enumerate(program.symbols)}
    nodes = {node.name: node for node in program.placeholders("input")}
    values = [nodes[name].meta["val"].shape[dim] for name, dim in program.symbols.values()]
    functions: dict[str, Any] = {"max": max, "min": min, "sizes": values}
    for expr in program.extra["dynamic"]:
        if not eval(f"{python_text(expr, sizes, functions)} % {degree} == 0", functions):
            raise TpcompileError(
                "shard a graph whose sizes vary",
                f"the plan divides {expr} by {degree}, which these inputs do not allow",
                "sequence_parallel=False",
            )
