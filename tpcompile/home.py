"""The model whose parameters the torch.compile backend shards: names, places, memory."""

import gc
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpcompile.errors import InputError, MeshError, TpcompileError
from tpcompile.optimizer import mark_moved
from tpcompile.parameters import place_parameters, sharded_for
from tpcompile.program import Leaf
from tpcompile.refusals import check_memory
from tpcompile.registry import install_registries, traced_parameters, weightless
from tpcompile.storage import ParamLayout


class Home:
    """One model, and how its parameters are placed so far."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
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
        self.model, self.mesh = model, mesh
        self.layouts: dict[str, ParamLayout] = {}
        """Of what is placed, by the first name of each."""

    def leaves(self) -> dict[int, Leaf]:
        """Id of each tensor, as Dynamo sees it -> what it is."""
        found: dict[int, Leaf] = {}
        for name, parameter in traced_parameters(self.model):
            found.setdefault(id(parameter), Leaf("parameter", name))
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

    def place(self, layouts: Mapping[str, ParamLayout], replaced: Callable[..., None]) -> None:
        """Shard parameters and free the whole ones; `replaced` is told of each pair."""
        install_registries(self.model)
        old = {name: p for name, p in self.traced().items() if name in layouts}

        def moved(before: nn.Parameter, after: nn.Parameter, place: Callable[..., Any]) -> None:
            mark_moved(before, after, place)
            replaced(before, after, place)

        place_parameters(self.model, layouts, self.mesh, moved)
        self.layouts |= layouts
        for parameter in old.values():
            parameter.grad = None
            parameter.data = weightless(parameter)

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


def _is_dtensor(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor)


def _is_ready(module: nn.Module) -> bool:
    return "_modules" in module.__dict__ and "_parameters" in module.__dict__


def _is_wrapper(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules


def _traced(module: nn.Module) -> Iterable[Tensor]:
    return (p for p in dict.values(module._parameters) if p is not None)
