"""The model whose parameters the torch.compile backend shards: names, places, memory."""

import gc
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpcompile.errors import InputError, MeshError, TpcompileError
from tpcompile.optimizer import check_optimizer, remap_parameter
from tpcompile.parameters import (
    mark_moved,
    move_parameters,
    moved,
    place_parameters,
    sharded_for,
    slots,
)
from tpcompile.problem import Pin
from tpcompile.program import Leaf
from tpcompile.refusals import check_memory
from tpcompile.registry import Registry, install_registries, traced_parameters, weightless
from tpcompile.storage import ParamLayout

_HOME = "_tpcompile_home"
"""Attribute of a model that the backend has sharded."""


def home_for(model: nn.Module, mesh: DeviceMesh, optimizer: torch.optim.Optimizer | None) -> "Home":
    """The home of a model: one, however often the model is compiled on the same ranks.

    Raises:
        TpcompileError: See `Home`, or the model is sharded over other ranks.
    """
    home = model.__dict__.get(_HOME)
    if home is not None and home.mesh != mesh:
        raise MeshError(
            f"compile {type(model).__name__} with the tpcompile backend on {mesh}",
            f"it is sharded over {home.mesh} already",
            "use the same mesh, or load full_state_dict into a new model",
        )
    return home or Home(model, mesh, optimizer)


class Home:
    """One model, and how its parameters are placed so far."""

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, optimizer: torch.optim.Optimizer | None
    ) -> None:
        """Of a model that nothing has sharded; `mesh` is the axis.

        Raises:
            TpcompileError: It is sharded, is on another device, or shares memory without a tie.
        """
        name = type(model).__name__
        if sharded_for(model) is not None or any(map(_is_dtensor, model.parameters())):
            raise TpcompileError(
                f"compile {name} with the tpcompile backend",
                "its parameters are DTensors already",
                "give the backend a plain model; one that tpcompile.shard has sharded is compiled "
                "with any other backend",
            )
        devices = {t.device.type for t in (*model.parameters(), *model.buffers())}
        if devices - {mesh.device_type}:
            raise MeshError(
                f"compile {name} with the tpcompile backend on {mesh.device_type} devices",
                f"the model is on {', '.join(sorted(devices))}",
                f'model.to("{mesh.device_type}") first, or make the mesh for the device it is on',
            )
        check_memory(model, f"compile {name} with the tpcompile backend")
        if optimizer is not None:
            check_optimizer(optimizer)
        self.model, self.mesh, self.optimizer = model, mesh, optimizer
        self.pins: dict[str, Pin] = {}
        """What a user asks of parameters."""
        self.layouts: dict[str, ParamLayout] = {}
        """Of what is placed, by the first name of each."""
        self.parked: set[str] = set()
        """What is placed although no graph has read it."""
        self.moving: dict[str, ParamLayout] = {}
        """Where graphs want what was parked."""
        self._complete = False

    def leaves(self) -> dict[int, Leaf]:
        """Id of each tensor, as Dynamo sees it and as its code hands it over -> what it is."""
        found: dict[int, Leaf] = {}
        for name, parameter in traced_parameters(self.model):
            leaf = found.setdefault(id(parameter), Leaf("parameter", name))
            module, attr = self.source(name)
            held = module._parameters
            if isinstance(held, Registry) and attr in held.shards:
                found.setdefault(id(held.shards[attr]), leaf)
        for name, buffer in self.model.named_buffers(remove_duplicate=False):
            found.setdefault(id(buffer), Leaf("buffer", name))
        return found

    def paths(self) -> dict[int, str]:
        """Id of each module -> its path."""
        return {id(module): path for path, module in self.model.named_modules()}

    def traced(self) -> dict[str, nn.Parameter]:
        """First name of each parameter -> what Dynamo sees."""
        first: dict[int, str] = {}
        every = dict(traced_parameters(self.model))
        return {n: p for n, p in every.items() if first.setdefault(id(p), n) == n}

    def place(self, layouts: Mapping[str, ParamLayout]) -> None:
        """Shard what has no place yet, free the whole parameters, note what has to move."""
        self.model.__dict__[_HOME] = self
        park: Any = torch.compiler.disable(self.park)  # it runs between compiled frames
        install_registries(self.model, self.mesh.device_type, park)
        old = {n: p for n, p in self.traced().items() if n in layouts.keys() - self.layouts.keys()}
        place_parameters(self.model, {n: layouts[n] for n in old}, self.mesh, self._moved)
        for parameter in old.values():
            parameter.grad = None
            parameter.data = weightless(parameter)
            increment_version(parameter)  # a backward that needs its values has to raise
        moving = {n: layouts[n] for n in self.parked & layouts.keys()}
        self.moving |= {n: o for n, o in moving.items() if o != self.layouts[n]}
        self.layouts |= layouts
        self.parked -= layouts.keys()

    def settle(self) -> None:
        """Move what was parked to where graphs want it; all ranks take part."""
        if self.moving:
            move_parameters(self.model, self.moving, self.mesh)
            self.moving = {}

    def _moved(
        self, old: nn.Parameter, new: nn.Parameter, place: Callable[[Tensor], Tensor]
    ) -> None:
        mark_moved(old, new, place)
        if self.optimizer is not None:
            remap_parameter(self.optimizer, old, new, place)

    def pinned(self) -> dict[str, ParamLayout]:
        """Layouts that graphs rely on."""
        return {name: o for name, o in self.layouts.items() if name not in self.parked}

    def park(self) -> None:
        """Shard what no graph has read so far, somehow: a graph that reads it will move it.

        Graphs of autograd may hold the whole ones, so these are replaced, and hand gradients on.
        """
        if self._complete:
            return
        left = {n: p for n, p in self.traced().items() if n not in self.layouts}
        layouts = {n: _even(tuple(p.shape), self.mesh.size()) for n, p in left.items()}
        with torch.inference_mode(False):
            place_parameters(self.model, layouts, self.mesh, self._moved)
            for places in slots(self.model):
                old = left.get(places[0].name)
                if old is not None:
                    stand_in = nn.Parameter(weightless(old), old.requires_grad)
                    for slot in places:
                        registry = slot.module._parameters
                        assert isinstance(registry, Registry)
                        registry.replace_traced(slot.attr, stand_in)
                    _hand_on_gradients(old)
        self.layouts |= layouts
        self.parked |= layouts.keys()
        self._complete = True

    def source(self, name: str) -> tuple[nn.Module, str]:
        """The module that holds a parameter, and its attribute."""
        path, _, attr = name.rpartition(".")
        return self.model.get_submodule(path), attr


def owner_of(parameters: Iterable[Tensor]) -> nn.Module:
    """The outermost module that holds these parameters, wrappers of torch.compile aside.

    Raises:
        InputError: None holds them, or several that are no parts of one another.
    """
    wanted = {id(p) for p in parameters}
    modules = [m for m in gc.get_objects() if issubclass(type(m), nn.Module) and _is_ready(m)]
    kept = [m for m in modules if not isinstance(m, torch.fx.GraphModule) and not _is_wrapper(m)]
    holding = {id(m) for m in kept if any(id(p) in wanted for p in _traced(m))}
    inner: set[int] = set()
    for module in kept:
        inner |= {id(child) for child in module.modules() if child is not module}
    roots = [m for m in kept if id(m) not in inner and holding & {id(c) for c in m.modules()}]
    whole = [m for m in roots if wanted <= {id(p) for _, p in traced_parameters(m)}]
    if len(whole) != 1:
        names = ", ".join(type(m).__name__ for m in whole)
        raise InputError(
            "compile a model with the tpcompile backend",
            f"its parameters are in {len(whole)} models ({names})"
            if whole
            else "no module holds the parameters of this graph",
            "say which is meant: backend=tpcompile.backend(mesh, model=model)",
        )
    return whole[0]


def _hand_on_gradients(old: nn.Parameter) -> None:
    """Let gradients that still come to a replaced parameter go to the other one."""

    def hand_on(parameter: Tensor) -> None:
        to = moved(parameter)
        assert to is not None
        assert parameter.grad is not None
        new, place = to
        grad = place(parameter.grad)
        new.grad = grad if new.grad is None else new.grad + grad
        parameter.grad = None

    if old.requires_grad:
        old.grad = None
        old.register_post_accumulate_grad_hook(hand_on)


def _even(shape: tuple[int, ...], size: int) -> ParamLayout:
    """Its longest dim dealt out, where that gives every rank something."""
    dim = max(range(len(shape)), key=shape.__getitem__, default=0)
    if not shape or shape[dim] < size:
        return ParamLayout.replicated(shape, size)
    return ParamLayout.sharded(shape, dim, ((1, shape[dim], 1),), size)


def _is_dtensor(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor)


def _is_ready(module: nn.Module) -> bool:
    return "_modules" in module.__dict__ and "_parameters" in module.__dict__


def _is_wrapper(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules


def _traced(module: nn.Module) -> Iterable[Tensor]:
    return (p for p in dict.values(module._parameters) if p is not None)
