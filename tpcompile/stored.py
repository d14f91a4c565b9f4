"""One stored parameter as a DTensor: make it, write into it, gather it; state dict hooks."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tpcompile.storage import ParamLayout
from tpcompile.stored_tensor import Stored


def distribute(full: Tensor, layout: ParamLayout, mesh: DeviceMesh) -> DTensor:
    """The DTensor of which this rank stores its part of `full`; the whole where replicated."""
    whole = layout.dim is None
    local = full.detach() if whole else layout.to_local(full, mesh.get_local_rank())
    return from_local(local, layout, mesh)


def from_local(local: Tensor, layout: ParamLayout, mesh: DeviceMesh) -> DTensor:
    """The DTensor of this rank's padded part. No traffic."""
    placement = Replicate() if layout.dim is None else Shard(layout.dim)
    return DTensor.from_local(local, mesh, [placement], run_check=False)


def copy_full(parameter: DTensor, full: Tensor, layout: ParamLayout) -> None:
    """Copy this rank's part of an original tensor into the parameter in place. No traffic."""
    mesh = parameter.device_mesh
    with torch.no_grad():
        if mesh.ndim == 1 and layout.dim is None:
            parameter.to_local().copy_(full)
        elif mesh.ndim == 1:
            parameter.to_local().copy_(layout.to_local(full, mesh.get_local_rank()))
        else:  # fully_shard has split the parts again
            storage = layout.to_storage(full).detach()
            whole = distribute_tensor(storage, mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(whole.to_local())


def gather_full(parameter: DTensor, layout: ParamLayout) -> Tensor:
    """The original tensor on the CPU, in its own memory. All ranks of the mesh take part."""
    if parameter.is_meta:
        return torch.empty(layout.shape, dtype=parameter.dtype, device="meta")
    with torch.no_grad():
        storage = parameter.full_tensor()
    full = layout.from_storage(storage)
    own = full is not storage or layout.dim is not None
    return full.cpu() if own or full.device.type != "cpu" else full.clone()


def read_whole(parameter: DTensor, layout: ParamLayout) -> Tensor:
    """The original tensor; its gradient, equal on all ranks, becomes this rank's part of it."""
    if layout.dim is None:
        return parameter.to_local()
    if not torch.is_grad_enabled():
        with torch.inference_mode():  # so that a write to it, which would be lost, is an error
            return layout.from_storage(parameter.full_tensor())
    return _Whole.apply(parameter.to_local(), parameter.detach(), layout)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, parameter: DTensor, layout: ParamLayout) -> Tensor:
        ctx.layout, ctx.rank = layout, parameter.device_mesh.get_local_rank()
        return layout.from_storage(parameter.full_tensor())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return ctx.layout.to_local(grads[0], ctx.rank), None, None


def install_hooks(module: nn.Module, layouts: Mapping[str, ParamLayout], mesh: DeviceMesh) -> None:
    """Let a module's state dicts have, and load, the original shapes of its own parameters.

    Args:
        module: Its parameters are DTensors, or will be before they are in `layouts`.
        layouts: By the attribute name of each; may change later.
        mesh: 1-D mesh of the tensor parallel axis.
    """
    module.register_load_state_dict_pre_hook(partial(_load_originals, layouts, mesh))
    module.register_state_dict_post_hook(partial(_view_originals, layouts, mesh))


def view_original(stored: DTensor, layout: ParamLayout, mesh: DeviceMesh) -> Stored:
    """What a state dict holds for a tensor in storage order; `mesh` is the 1-D one of the axis."""
    names, own = stored.device_mesh.mesh_dim_names, mesh.mesh_dim_names
    return Stored.of(stored, layout, names.index(own[0]) if names and own else 0)


def _view_originals(
    layouts: Mapping[str, ParamLayout],
    mesh: DeviceMesh,
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
) -> None:
    for attr, layout in layouts.items():
        if layout.is_identity():
            continue
        value = state_dict.get(prefix + attr)
        # With keep_vars=True the value is the parameter itself, and must stay it.
        if isinstance(value, DTensor) and value is not module._parameters[attr]:
            state_dict[prefix + attr] = view_original(value, layout, mesh)


def _load_originals(
    layouts: Mapping[str, ParamLayout],
    mesh: DeviceMesh,
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Copy this rank's parts; leave the parameter itself as the value for torch to copy."""
    for attr, layout in layouts.items():
        key, parameter = prefix + attr, module._parameters[attr]
        value = state_dict.get(key)
        if not isinstance(value, Tensor) or parameter is None:
            continue
        if tuple(value.shape) != layout.shape:
            state_dict[key] = parameter
            found, wanted = list(value.shape), list(layout.shape)
            errors.append(f"size mismatch for {key}: {found} in the state dict, {wanted} here.")
        else:
            assert isinstance(parameter, DTensor)
            assign = metadata.get("assign_to_params_buffers", False)
            state_dict[key] = _loaded(value, parameter, layout, mesh, assign)


def _loaded(
    value: Tensor, parameter: DTensor, layout: ParamLayout, mesh: DeviceMesh, assign: bool
) -> Tensor:
    """The value that torch may copy into or put in the place of `parameter`."""
    if isinstance(value, Stored) and value.param_layout == layout:
        return value.stored()
    if isinstance(value, DTensor):
        if layout.is_identity():
            return value
        value = value.full_tensor()  # in the original's order, whatever its placements
    if parameter.is_meta:
        return distribute(value, layout, mesh) if assign else parameter
    copy_full(parameter, value, layout)
    return parameter
