"""`shard`: make a model tensor parallel, in place."""

import functools
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpcompile import pipeline
from tpcompile.agreement import agree, fingerprints
from tpcompile.clone import clone
from tpcompile.dispatch import Dispatcher
from tpcompile.emit import emit
from tpcompile.errors import MeshError, TpcompileError
from tpcompile.explain import Explanation
from tpcompile.hardware import Hardware
from tpcompile.optimizer import (
    check_optimizer,
    hook_optimizer,
    remap_parameter,
    watch_optimizers,
)
from tpcompile.parameters import note_sharded, shard_parameters, sharded_for
from tpcompile.partial import Call, Part, Parts, joined_plan, parts_of
from tpcompile.pins import (
    PlanLike,
    outputs_for,
    overlap_chunks_for,
    pins_from_plan,
    sequence_parallel_for,
)
from tpcompile.pipeline import OwnPasses
from tpcompile.plan import Plan, plan_of
from tpcompile.planning import Inputs, arguments_of, block_paths, captured, check_rules
from tpcompile.profiles import hardware_for
from tpcompile.program import Program
from tpcompile.recapture import Recapture, Settings, twin_of
from tpcompile.refusals import check_before_shard
from tpcompile.sharded_module import install, install_around, install_inner


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    example_inputs: Inputs = None,
    *,
    axis: str = "tp",
    sequence_parallel: bool | str = "auto",
    plan: PlanLike = None,
    optimizer: torch.optim.Optimizer | None = None,
    outputs: str = "replicated",
    hardware: Hardware | str | os.PathLike[str] | None = None,
    overlap_chunks: int | str = 1,
    strict: bool = False,
    partial: bool = False,
    passes: OwnPasses | None = None,
) -> nn.Module:
    """Make `model` tensor parallel on one axis of `mesh`, in place, and return it.

    Args:
        model: Any module whose forward torch.export can trace; it may be on the meta device.
        mesh: May have other axes (data, pipeline); they are left alone.
        example_inputs: What the forward takes: a dict of keyword arguments, a tuple of
            positional ones, or one tensor.  None: made from a Hugging Face model's config.
        axis: Name of the mesh axis to shard over.
        sequence_parallel: "auto" lets the cost decide; True and False pin it.
        plan: Placements (`Shard(dim)`, `Replicate()`) by parameter name pattern, a `Plan` or the
            file of one; the rest is solved around them.
        optimizer: An optimizer made earlier; its groups and state follow the new parameters.
        outputs: "replicated" gives every rank whole outputs; "sharded" leaves those that are split
            as DTensors on the axis (logits, for a loss or a sampler that takes them so).
        hardware: What plans are priced on: a profile's name, a `Hardware` or a file of one; None:
            by the mesh's device, and h100-nvlink for a CPU mesh, which rehearses for GPUs.
        overlap_chunks: In how many chunks of tokens linears run, so that the collective of one is
            sent while the next is multiplied; "auto" lets the cost decide.
        strict: Refuse ops without a rule instead of replicating them.
        partial: Where the model cannot be traced whole, shard the repeated blocks that can, and
            replicate the rest.
        passes: Functions from a program to a program, by the name of the pass they run after.

    Returns:
        The same object: same parameter names, same calls, parameters now DTensors. Its `plan` is
        the plan, its `explain()` the reasons (as `tpcompile.explain`).

    Raises:
        TpcompileError: With what was asked, what was found and how to fix it; on every rank,
            and the model is unchanged.
    """
    submesh = _submesh(model, mesh, axis)
    if optimizer is not None:
        check_optimizer(optimizer)
    options = {
        "sequence_parallel": sequence_parallel_for(sequence_parallel, plan),
        "outputs": outputs_for(outputs),
        "hardware": hardware_for(hardware, mesh.device_type),
        "caches": {},
        "overlap_chunks": overlap_chunks_for(overlap_chunks),
    }

    def decide() -> tuple[tuple[Any, ...], dict[str, Any], Parts]:
        check_before_shard(model, block_paths(model))
        args, kwargs = arguments_of(model, example_inputs)
        pins = pins_from_plan(model, plan)

        def planned(path: str, module: nn.Module, call: Call) -> Program:
            own = {n.removeprefix(path): p for n, p in pins.items() if n.startswith(path)}
            program = captured(module, *call, passes=passes)
            pipeline.plan(program, submesh.size(), pins=own, **_options_for(path, options))
            check_rules(program, strict=strict)
            return program

        parts = parts_of(model, (args, kwargs), planned, partial=partial)
        parts.check_pins(pins)
        return args, kwargs, parts

    _, _, parts = agree(
        f"shard {type(model).__name__}",
        decide,
        lambda made: {
            **fingerprints(model, *made[:2], made[2].programs()),
            "overlap_chunks": str(overlap_chunks),
        },
        lambda made: made[2].programs().values(),
        submesh.get_group(),
    )
    for program in parts.programs().values():
        options["caches"].update(program.extra["cache_entries"])
    _install(model, parts, submesh, optimizer, Settings(options, passes, strict))
    return model


def _install(
    model: nn.Module,
    parts: Parts,
    mesh: DeviceMesh,
    optimizer: torch.optim.Optimizer | None,
    settings: Settings,
) -> None:
    """Shard the parameters, and make each part run its graphs."""
    group = mesh.get_group()
    axis = (group.group_name, mesh.size(), mesh.get_local_rank())
    modules = {part.path: model.get_submodule(part.path) for part in parts}
    twins = {path: twin_of(module) for path, module in modules.items()}
    planned = {part.path: clone(part.program) for part in parts}  # localising changes the other
    layouts = {}
    for part in parts:
        pipeline.local(part.program, axis)
        pipeline.run(part.program, pipeline.EMIT)
        layouts |= part.named(part.program.extra["layouts"])
    replaced = None if optimizer is None else functools.partial(remap_parameter, optimizer)
    shard_parameters(model, layouts, mesh, replaced)
    watch_optimizers()
    if optimizer is not None:
        hook_optimizer(optimizer)
    for part in parts:
        module = modules[part.path]
        own = part.own(sharded_for(model).layouts)  # type: ignore[union-attr]
        mine = replace(settings, options=_options_for(part.path, settings.options))
        recapture = Recapture(module, twins[part.path], own, mesh, mine)
        dispatcher = Dispatcher(module, mesh.device_type, recapture)
        dispatcher.add(*part.call, emit(part.program, recapture.modules, mesh))
        note_sharded(module, own, mesh)
        install(module, dispatcher)
        _install_inner(part, recapture)
        _set_plan(module, plan_of(part.program, own))
        _explain_as(module, planned[part.path])
    if parts.reason:
        install_around(model, list(modules.values()))
        _set_plan(model, joined_plan(model, parts))


def _install_inner(part: Part, outer: Recapture) -> None:
    """Let modules outside of the blocks be called by themselves, as `generate` calls an encoder."""
    blocks: set[str] = part.program.extra["block_paths"]
    for path, module in outer.modules.items():
        inside = any(path == block or path.startswith(f"{block}.") for block in blocks)
        runs = type(module).forward is not nn.Module.forward
        if path and runs and not inside and next(module.parameters(), None) is not None:
            recapture = outer.inside(path)
            note_sharded(module, dict(recapture.layouts), outer.mesh)
            dispatcher = Dispatcher(module, outer.mesh.device_type, recapture)
            install_inner(module, dispatcher)


def _options_for(path: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a part: what blocks hand to the Python around them is whole."""
    return {**options, "outputs": "replicated", "caches": None} if path else dict(options)


def _set_plan(module: nn.Module, plan: Plan) -> None:
    if not hasattr(module, "plan"):  # a model that has something of this name keeps it
        module.__dict__["plan"] = plan


def _explain_as(module: nn.Module, planned: Program) -> None:
    if not hasattr(module, "explain"):
        module.__dict__["explain"] = lambda optimizer="adamw": Explanation(planned, optimizer)


def _submesh(model: nn.Module, mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """The 1-D mesh of the axis, after everything that can be wrong with it."""
    name = type(model).__name__
    submesh = axis_mesh(mesh, axis, f"shard({name}, mesh={type(mesh).__name__})", f"shard {name}")
    if sharded_for(model) is not None:
        raise TpcompileError(
            f"shard {name}",
            "this model is sharded already",
            "shard a model once; to change the degree, load full_state_dict into a new model",
        )
    devices = {t.device.type for t in (*model.parameters(), *model.buffers())} - {"meta"}
    if devices - {mesh.device_type}:
        raise MeshError(
            f"shard {name} over a mesh of {mesh.device_type} devices",
            f"the model is on {', '.join(sorted(devices))}",
            f'model.to("{mesh.device_type}") first, or make the mesh for the device it is on',
        )
    return submesh


def axis_mesh(mesh: Any, axis: str, call: str, asked: str) -> DeviceMesh:
    """The 1-D mesh of an axis; `call` and `asked` are the user's, for errors.

    Raises:
        MeshError: It is no mesh, or has no such axis.
    """
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            call,
            "the mesh is not a DeviceMesh",
            'mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("tp",))',
        )
    names = mesh.mesh_dim_names or ()
    if axis not in names:
        raise MeshError(
            f"{asked} over mesh axis {axis!r}",
            f"the mesh has {'axes ' + ', '.join(map(repr, names)) if names else 'no named axes'}",
            f'init_device_mesh(..., mesh_dim_names=("{axis}",)), or pass axis= one of its names',
        )
    return mesh[axis]
