"""`shard`: make a model tensor parallel, in place."""

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpcompile import pipeline
from tpcompile.agreement import agree
from tpcompile.emit import emit
from tpcompile.errors import MeshError, TpcompileError
from tpcompile.optimizer import (
    check_optimizer,
    hook_optimizer,
    remap_parameter,
    watch_optimizers,
)
from tpcompile.parameters import shard_parameters, sharded_for
from tpcompile.pins import PlanLike, pins_from_layouts, pins_from_plan, sequence_parallel_for
from tpcompile.plan import plan_of
from tpcompile.planning import (
    Inputs,
    arguments_of,
    captured,
    check_rules,
)
from tpcompile.program import Program
from tpcompile.runtime import RUNTIME, Runtime, ShardedModule, Variant


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    example_inputs: Inputs = None,
    *,
    axis: str = "tp",
    sequence_parallel: bool | str = "auto",
    plan: PlanLike = None,
    optimizer: torch.optim.Optimizer | None = None,
    strict: bool = False,
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
        strict: Refuse ops without a rule instead of replicating them.

    Returns:
        The same object: same parameter names, same calls, parameters now DTensors.

    Raises:
        TpcompileError: With what was asked, what was found and how to fix it; on every rank,
            and the model is unchanged.
    """
    submesh = _submesh(model, mesh, axis)
    if optimizer is not None:
        check_optimizer(optimizer)
    group, size = submesh.get_group(), submesh.size()
    rank = submesh.get_local_rank()

    def decide() -> tuple[Program, tuple[Any, ...], dict[str, Any]]:
        args, kwargs = arguments_of(model, example_inputs)
        pins = pins_from_plan(model, plan)
        program = captured(model, args, kwargs)
        asked = sequence_parallel_for(sequence_parallel, plan)
        pipeline.plan(program, size, sequence_parallel=asked, pins=pins)
        check_rules(program, strict=strict)
        return program, args, kwargs

    program, args, kwargs = agree(model, decide, group)
    twin = _twin(model)
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
    runtime = Runtime(
        compile=_Compiler(
            twin, layouts, (group.group_name, size, rank), program.extra["sequence_parallel"]
        ),
        size=size,
        forward=model.forward,
    )
    _install(model, runtime)
    variant = emit(program, model, rank)
    runtime.add(model, args, kwargs, variant)
    model.__dict__["plan"] = plan_of(program, layouts)
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


def _twin(model: nn.Module) -> nn.Module | None:
    """A copy of the model without weights, for later captures; None where it cannot be copied."""
    stand_ins = {id(p): _weightless(p) for p in model.parameters()}
    try:
        return copy.deepcopy(model, stand_ins)
    except Exception:
        return None


def _weightless(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter of the same shape, strides and device that holds no memory."""
    bare = torch.empty_like(parameter, requires_grad=False)
    bare.untyped_storage().resize_(0)
    return nn.Parameter(bare, parameter.requires_grad)


class _Compiler:
    """Captures, plans and emits again for inputs no variant fits, parameters where they are."""

    def __init__(
        self,
        twin: nn.Module | None,
        layouts: Mapping[str, Any],
        axis: tuple[str, int, int],
        sequence_parallel: bool | str,
    ) -> None:
        self.twin, self.layouts, self.axis = twin, layouts, axis
        self.sequence_parallel = sequence_parallel

    def __call__(self, model: nn.Module, tensors: list[Tensor], args: Any, kwargs: Any) -> Variant:
        """A variant of `model` for these inputs."""
        if self.twin is None:
            raise TpcompileError(
                f"{type(model).__name__} called with inputs of another structure",
                "the model could not be copied when it was sharded, so it cannot be traced again",
                "make it deepcopy-able, or pass example_inputs of this structure to shard",
            )
        for mine, theirs in zip(self.twin.modules(), model.modules(), strict=False):
            mine.training = theirs.training
        for (_, mine), (_, theirs) in zip(
            self.twin.named_parameters(), model.named_parameters(), strict=False
        ):
            mine.requires_grad_(theirs.requires_grad)
        program = captured(self.twin, args, kwargs)
        pipeline.plan(
            program,
            self.axis[1],
            sequence_parallel=self.sequence_parallel,
            pins=pins_from_layouts(self.layouts),
        )
        check_rules(program, strict=False)
        pipeline.local(program, self.axis)
        pipeline.run(program, pipeline.EMIT)
        return emit(program, model, self.axis[2])


def _install(model: nn.Module, runtime: Runtime) -> None:
    """Make the model's class a `ShardedModule` with the original's name and signature."""
    original = type(model)

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return ShardedModule.forward(self, *args, **kwargs)  # type: ignore[arg-type]

    model.__class__ = type(
        original.__name__,
        (ShardedModule, original),
        {"forward": forward, "__module__": original.__module__, "__doc__": original.__doc__},
    )
    model.__dict__[RUNTIME] = runtime
