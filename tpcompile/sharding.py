"""`shard`: make a model tensor parallel, in place."""

import functools
import os
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
from tpcompile.parameters import shard_parameters, sharded_for
from tpcompile.pins import PlanLike, outputs_for, pins_from_plan, sequence_parallel_for
from tpcompile.pipeline import OwnPasses
from tpcompile.plan import plan_of
from tpcompile.planning import Inputs, arguments_of, captured, check_rules
from tpcompile.profiles import hardware_for
from tpcompile.program import Program
from tpcompile.recapture import Recapture, twin_of
from tpcompile.sharded_module import install


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
    strict: bool = False,
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
        strict: Refuse ops without a rule instead of replicating them.
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
    group, size = submesh.get_group(), submesh.size()
    rank = submesh.get_local_rank()
    options = {
        "sequence_parallel": sequence_parallel_for(sequence_parallel, plan),
        "outputs": outputs_for(outputs),
        "hardware": hardware_for(hardware, mesh.device_type),
    }

    def decide() -> tuple[Program, tuple[Any, ...], dict[str, Any]]:
        args, kwargs = arguments_of(model, example_inputs)
        pins = pins_from_plan(model, plan)
        program = captured(model, args, kwargs, passes=passes)
        pipeline.plan(program, size, pins=pins, **options)
        check_rules(program, strict=strict)
        return program, args, kwargs

    program, args, kwargs = agree(
        f"shard {type(model).__name__}", decide, lambda made: fingerprints(model, *made), group
    )
    planned = clone(program)  # localising changes the other one in place
    twin = twin_of(model)
    pipeline.local(program, (group.group_name, size, rank))
    pipeline.run(program, pipeline.EMIT)
    layouts = program.extra["layouts"]
    replaced = None
    if optimizer is not None:
        replaced = functools.partial(remap_parameter, optimizer)
    shard_parameters(model, layouts, submesh, replaced)
    watch_optimizers()
    if optimizer is not None:
        hook_optimizer(optimizer)
    layouts = sharded_for(model).layouts  # type: ignore[union-attr]
    recapture = Recapture(model, twin, layouts, submesh, passes, options)
    dispatcher = Dispatcher(model, mesh.device_type, recapture)
    dispatcher.add(args, kwargs, emit(program, recapture.modules, submesh))
    install(model, dispatcher)
    model.__dict__["plan"] = plan_of(program, layouts)
    if not hasattr(type(model), "explain"):
        model.__dict__["explain"] = lambda optimizer="adamw": Explanation(planned, optimizer)
    return model


def _submesh(model: nn.Module, mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """The 1-D mesh of the axis, after everything that can be wrong with it."""
    name = type(model).__name__
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"shard({name}, mesh={type(mesh).__name__})",
            "the mesh is not a DeviceMesh",
            'mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("tp",))',
        )
    names = mesh.mesh_dim_names or ()
    if axis not in names:
        raise MeshError(
            f"shard {name} over mesh axis {axis!r}",
            f"the mesh has {'axes ' + ', '.join(map(repr, names)) if names else 'no named axes'}",
            f'init_device_mesh(..., mesh_dim_names=("{axis}",)), or pass axis= one of its names',
        )
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
    return mesh[axis]
