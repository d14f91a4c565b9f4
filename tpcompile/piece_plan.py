"""How one graph of Dynamo's becomes what runs in its place."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from tpcompile import pipeline
from tpcompile.agreement import agree, digest, draws_random, meet, tensor_digest
from tpcompile.backend_text import PieceText
from tpcompile.clone import clone
from tpcompile.dynamo_graph import lower
from tpcompile.errors import CaptureError, InputError, ShardingError, TpcompileError
from tpcompile.home import Home, home_for, owner_of
from tpcompile.piece import Compiled, Place, Runnable, kinds_of, run_whole, runnable
from tpcompile.pins import PlanLike, pins_from_layouts, pins_from_plan
from tpcompile.planning import block_paths, check_rules
from tpcompile.program import Leaf, Program
from tpcompile.program_edit import arguments
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
    model: nn.Module | None
    """The one that will be compiled; None: any, found by the parameters of graphs."""
    homes: list[Home] = field(default_factory=list)
    """Of the models whose graphs have come, or will come."""

    def add(self, model: nn.Module) -> Home:
        """The home of a model, after everything that can be wrong with it."""
        home = home_for(model, self.mesh, self.optimizer)
        home.pins = pins_from_plan(model, self.plan)
        return home

    def home_of(self, parameters: list[nn.Parameter]) -> Home:
        """The model that holds the parameters of a graph."""
        wanted = set(map(id, parameters))
        for home in self.homes:
            if wanted <= home.leaves().keys():
                return home
        if self.model is not None:
            raise InputError(
                f"shard a graph of {type(self.model).__name__}",
                "it reads parameters that are not of this model",
                "make a backend of its own for every model: tpcompile.backend(mesh, model=model)",
            )
        return self.add(owner_of(parameters))

    def compile_graph(self, graph: fx.Graph, dynamic: bool) -> Compiled:
        """A local graph, compiled at its first call.

        Not before: in a backend's call modules of graphs are lazy, and Dynamo skips their forward.
        """
        made: list[Compiled] = []

        def run(*args: Any) -> Any:
            if not made:
                gm = fx.GraphModule(nn.Module(), graph, class_name="Local")
                inner = self.inner
                made.append(
                    gm.forward
                    if inner == "eager"
                    else torch.compile(gm, backend=inner, fullgraph=True, dynamic=dynamic)
                )
            return made[0](*args)

        return run


@dataclass(frozen=True)
class Decision:
    """What the ranks agree on for a graph."""

    program: Any
    """The planned Program."""
    normal: Any
    """The same before it was planned."""
    ends: Any
    """Its Ends."""
    whole: str = ""
    """Why the graph has to run whole instead."""


class Piece:
    """One graph of Dynamo's, and its variants: one for every choice of what is trained."""

    def __init__(self, shared: Shared, number: int, gm: fx.GraphModule, inputs: list[Any]) -> None:
        self.shared, self.number, self.end = shared, number, graph_end(gm)
        self.planned: Program | None = None
        self.whole = ""
        self.variants: dict[tuple[bool, ...], Runnable] = {}
        parameters = [t for t in inputs if isinstance(t, nn.Parameter)]
        if not parameters:
            self.run: Compiled = compiler_for(shared.inner)(gm, inputs)
            return
        self.home: Home = shared.home_of(parameters)
        self.asked = f"compile graph {self.number} of {type(self.home.model).__name__}"
        self.gm, self.others = gm, []
        self.given = {i: t for i, t in enumerate(inputs) if isinstance(t, nn.Parameter)}
        self.given_names = self._named(inputs)
        # A checkpoint around the compiled module would count what tracing saves.
        aside = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with torch.inference_mode(False), aside:
            self.mine = self._first(gm, inputs)
        self.run = self._run_any

    def _run_any(self, *args: Any) -> Any:
        """Run with the parameters given: Dynamo has one graph for modules that are alike."""
        for piece in (self, *self.others):
            if all(args[i] is parameter for i, parameter in piece.given.items()):
                return piece.mine(*args)
        if self._named(args) == self.given_names:
            self.given = {i: args[i] for i in self.given}  # renewed, as by another dtype
            return self.mine(*args)
        self.others.append(Piece(self.shared, self.number, self.gm, list(args)))
        return self.others[-1].mine(*args)

    def _named(self, args: Sequence[Any]) -> list[Leaf | None]:
        leaves = self.home.leaves()
        return [leaves.get(id(args[i])) for i in self.given]

    def _first(self, gm: fx.GraphModule, inputs: list[Any]) -> Compiled:
        """Plan with all ranks, place what is new, and compile."""
        leaves = self.home.leaves()
        names = {i: leaves[id(t)] for i, t in enumerate(inputs) if id(t) in leaves}
        group = self.shared.mesh.get_group()
        meet(group, self.asked, kinds_of(inputs))
        made = agree(
            self.asked,
            lambda: self._decide(gm, names),
            lambda made: self._prints(made, inputs),
            lambda made: [made.program] if made.program else [],
            group,
        )
        if self.home not in self.shared.homes:
            self.shared.homes.append(self.home)
        if made.whole:
            self.whole = made.whole
            warnings.warn(
                f"tpcompile cannot split a graph, and runs it whole: {made.whole}", stacklevel=2
            )
            self.home.place({})
            own = {i: n.name for i, n in names.items() if n.kind == "parameter"}
            return run_whole(gm, {i: self.home.source(name) for i, name in own.items()})
        self.normal, self.ends, self.planned = made.normal, made.ends, clone(made.program)
        self._localize(made.program)
        layouts = made.program.extra["layouts"]
        self.home.place(layouts)
        self.names = list(layouts)
        self._keep(made.program)
        return self._run

    def _decide(self, gm: fx.GraphModule, names: dict[int, Leaf]) -> Decision:
        kind = self.shared.mesh.device_type
        on = torch.is_autocast_enabled(kind)
        autocast = (kind, torch.get_autocast_dtype(kind)) if on else None
        try:
            program, ends = lower(gm, names, self.home.paths(), autocast)
            program.extra["model"] = type(self.home.model).__name__
            program.extra["capture_seconds"] = 0.0
            program.extra["block_paths"] = block_paths(self.home.model)
            pipeline.run(program, pipeline.NORMALIZE)
            _check_updates(program)
        except CaptureError as error:
            if self.shared.strict:
                raise
            return Decision(None, None, None, f"{error.asked} {error.found}")
        normal = clone(program)
        try:
            return Decision(self._plan(program), normal, ends)
        except ShardingError as error:
            if not self.home.pinned() or self.shared.strict:
                raise
            self._plan(clone(normal), pinned=False)  # raises where plan= is the reason
            return Decision(None, None, None, error.found)

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
        group = self.shared.mesh.get_group()
        with torch.inference_mode(False):
            meet(group, self.asked, f"trained: {[n for n, on in flags.items() if on]}")
            program = agree(
                self.asked,
                # Dynamo's guards are made: they cannot check sizes that sequences are split by.
                lambda: self._plan(clone(self.normal), sequence_parallel=False),
                lambda p: {"plan": f";{digest(p)}"},
                lambda p: [p],
                group,
            )
            self._localize(program)
            return self._keep(program)

    def _plan(self, program: Program, pinned: bool = True, **changed: Any) -> Program:
        """Decide, with parameters that have a place where they are."""
        shared, placed = self.shared, self.home.layouts
        read = {program.leaves[n.name].name: n for n in program.placeholders("parameter")}
        for name in read.keys() & placed.keys():  # Dynamo does not see what is trained of shards
            trained = Place(*self.home.source(name), placed[name]).parameter().requires_grad
            val = read[name].meta["val"]
            read[name].meta["val"] = val.detach().requires_grad_(trained)
        pins = {name: pin for name, pin in self.home.pins.items() if name in read}
        if pinned:
            pins |= pins_from_layouts({n: o for n, o in self.home.pinned().items() if n in read})
        pipeline.plan(program, shared.mesh.size(), pins=pins, **{**shared.options, **changed})
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

    def _prints(self, made: Decision, inputs: list[Any]) -> dict[str, str]:
        """What must be equal on all ranks; of values only those not seen before."""
        found = {"mode": f";{[module.training for module in self.home.model.modules()]}"}
        if made.whole:
            return {**found, "reason": f";{made.whole}"}
        program = made.program
        read = {program.leaves[n.name].name for n in program.placeholders("parameter")}
        for name, parameter in self.home.traced().items():
            if name in read - self.home.layouts.keys():
                found[f"parameter {name}"] = tensor_digest(parameter)
        if self.number == 0:
            for name, i in made.ends.arguments.items():
                if program.leaves[name].kind == "input":
                    found[f"input {program.leaves[name].name}"] = tensor_digest(inputs[i])
        if draws_random(program):
            found["random seed"] = f"seed {torch.initial_seed()}"
        return {**found, "plan": f";{digest(program)}"}

    def text(self) -> PieceText:
        """For `explain`."""
        return PieceText(self.number, *self.end, self.planned, self.whole, len(self.variants))


def _check_updates(program: Program) -> None:
    """Refuse writes that the caller could not be given: into parameters, or with a gradient."""
    flat = arguments(program.output())[0]
    for name, new in zip(program.updates, flat[program.n_outputs :], strict=True):
        leaf = program.leaves[name]
        traced = leaf.kind == "input" and new.target is torch.ops.aten.detach.default
        if leaf.kind == "parameter" or traced:
            raise CaptureError(
                f"shard a graph that writes to {leaf.name}",
                "it is a parameter" if leaf.kind == "parameter" else "a gradient flows into it",
                "compute a new tensor instead",
            )


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
