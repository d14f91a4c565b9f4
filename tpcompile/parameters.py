"""Turn the parameters of a model into DTensors, in the user's own module tree."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpcompile.errors import ShardingError
from tpcompile.storage import ParamLayout
from tpcompile.stored import distribute, install_hooks
from tpcompile.torch_private import dtensor_of, local_of, spec_of


@dataclass(frozen=True)
class Slot:
    """A place in the module tree that holds a parameter."""

    module: nn.Module
    attr: str
    name: str
    """Dotted name from the root."""


@dataclass(frozen=True)
class Sharded:
    """How a sharded model's parameters are stored."""

    layouts: dict[str, ParamLayout]
    """Of every name that each parameter had then (tied ones have several)."""
    mesh: DeviceMesh
    """The 1-D mesh of the tensor parallel axis."""


Replaced = Callable[[nn.Parameter, nn.Parameter, Callable[[Tensor], DTensor]], None]
"""`replaced(old, new, place)`: `place` makes a DTensor of any tensor of the old one's shape."""

_LAYOUTS = "_tpcompile_layouts"
"""Attribute of every module of a sharded model: layouts of its own parameters."""

_SHARDED: WeakKeyDictionary[nn.Module, Sharded] = WeakKeyDictionary()


def sharded_for(model: nn.Module) -> Sharded | None:
    """The storage of a model's parameters; None where `shard_parameters` has not seen it."""
    return _SHARDED.get(model)


def layouts_by_id(model: nn.Module) -> dict[int, ParamLayout]:
    """Id of each parameter of a sharded model -> its storage; names change when users wrap."""
    return {
        id(module._parameters[attr]): layout
        for module in model.modules()
        for attr, layout in layouts_of(module).items()
    }


def layouts_of(module: nn.Module) -> dict[str, ParamLayout]:
    """Attribute of each sharded parameter of a module's own -> its storage."""
    return module.__dict__.get(_LAYOUTS, {})


def note_sharded(module: nn.Module, layouts: dict[str, ParamLayout], mesh: DeviceMesh) -> None:
    """Note how the parameters of a sharded model's submodule are stored, by their names in it."""
    _SHARDED[module] = Sharded(layouts, mesh)


def copy_sharded(model: nn.Module, copied: nn.Module) -> None:
    """Note that the parameters of a copy are stored as the model's are."""
    _SHARDED[copied] = _SHARDED[model]


def all_sharded() -> list[tuple[nn.Module, Sharded]]:
    """Every sharded model that is alive."""
    return list(_SHARDED.items())


def slots(model: nn.Module) -> Iterator[list[Slot]]:
    """The places of every parameter, in the order of `named_parameters`; tied ones together."""
    found: dict[int, list[Slot]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for attr, parameter in _own(module).items():
            name = f"{path}.{attr}" if path else attr
            found.setdefault(id(parameter), []).append(Slot(module, attr, name))
    yield from found.values()


def shard_parameters(
    model: nn.Module,
    layouts: Mapping[str, ParamLayout],
    mesh: DeviceMesh,
    replaced: Replaced | None = None,
) -> None:
    """Replace every parameter of `model` by a DTensor parameter that holds this rank's part.

    One after another: beside the shards, only one full parameter's part is held twice.  Tied
    parameters stay one object.  Python attributes, `requires_grad` and gradients are kept, meta
    parameters stay meta.  Parameters without a layout are replicated.  Buffers stay plain and
    whole; like parameters they end on the mesh's device.

    Args:
        model: Changed in place.
        layouts: By any name of the parameter.
        mesh: 1-D mesh of the tensor parallel axis.
        replaced: Told of each pair while both are alive (see `optimizer.remap_parameter`).

    Raises:
        ShardingError: a parameter is a DTensor already; nothing is changed.
    """
    _check_plain(model)
    rest = {
        places[0].name: ParamLayout.replicated(_at(places[0]).shape, mesh.size())
        for places in slots(model)
        if not any(slot.name in layouts for slot in places)
    }
    place_parameters(model, {**rest, **layouts}, mesh, replaced)
    _move_buffers(model, mesh.device_type)


def place_parameters(
    model: nn.Module,
    layouts: Mapping[str, ParamLayout],
    mesh: DeviceMesh,
    replaced: Replaced | None = None,
) -> None:
    """`shard_parameters` of those that have a layout and no place yet; buffers are left alone."""
    known = _SHARDED.get(model)
    by_name: dict[str, ParamLayout] = {}
    for places in list(slots(model)):
        given = [layouts[slot.name] for slot in places if slot.name in layouts]
        if not given or (known is not None and places[0].name in known.layouts):
            continue
        old, layout = _at(places[0]), given[0]
        assert layout.shape == tuple(old.shape), f"{places[0].name}: {layout} for {old.shape}"
        new = renew(old, distribute(old, layout, mesh), places)
        if old.grad is not None:
            new.grad = distribute(old.grad, layout, mesh)
        if replaced is not None:
            replaced(old, new, lambda full, layout=layout: distribute(full, layout, mesh))
        by_name.update({slot.name: layout for slot in places})
    _note(model, by_name, mesh)


def move_parameters(model: nn.Module, layouts: Mapping[str, ParamLayout], mesh: DeviceMesh) -> None:
    """Store sharded parameters otherwise; all ranks take part, and optimizers follow."""
    by_name: dict[str, ParamLayout] = {}
    before = _SHARDED[model].layouts
    for places in list(slots(model)):
        layout = layouts.get(places[0].name)
        if layout is not None:
            old, was = _at(places[0]), before[places[0].name]
            assert isinstance(old, DTensor)

            def place(value: Tensor, was: Any = was, layout: Any = layout) -> DTensor:
                if isinstance(value, DTensor):
                    value = was.from_storage(value.full_tensor())
                return distribute(value, layout, mesh)

            new = renew(old, place(old.detach()), places)
            new.grad = None if old.grad is None else place(old.grad)
            mark_moved(old, new, place)
            by_name.update({slot.name: layout for slot in places})
    _note(model, by_name, mesh)


_MOVED = "_tpcompile_moved"
"""Attribute of a parameter that another has replaced."""


def mark_moved(old: nn.Parameter, new: nn.Parameter, place: Callable[[Tensor], Tensor]) -> None:
    """Note on a parameter that another has replaced it; `place` is as for `Replaced`."""
    vars(old)[_MOVED] = new, place


def moved(parameter: Tensor) -> tuple[nn.Parameter, Callable[[Tensor], Tensor]] | None:
    """What `mark_moved` noted."""
    return getattr(parameter, _MOVED, None)  # Dynamo, in a compiled step, cannot follow vars


def _note(model: nn.Module, by_name: dict[str, ParamLayout], mesh: DeviceMesh) -> None:
    """Note how parameters are stored now, for state dicts and whoever asks."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        own = {attr: by_name[prefix + attr] for attr in _own(module) if prefix + attr in by_name}
        if own and _LAYOUTS not in module.__dict__:
            module.__dict__[_LAYOUTS] = {}
            install_hooks(module, module.__dict__[_LAYOUTS], mesh)
        if own:
            module.__dict__[_LAYOUTS].update(own)
    known = _SHARDED.get(model)
    _SHARDED[model] = Sharded({**(known.layouts if known else {}), **by_name}, mesh)


def _at(slot: Slot) -> nn.Parameter:
    parameter = slot.module._parameters[slot.attr]
    assert parameter is not None
    return parameter


def local_parameter(parameter: Tensor, layout: ParamLayout, rank: int) -> Tensor:
    """This rank's part without padding. Differentiable; the padding's gradient is zero.

    The gradient of a replicated parameter must arrive summed over the ranks: the graph does that.
    """
    if not isinstance(parameter, DTensor):
        raise ShardingError(
            f"run a sharded model with a parameter of shape {tuple(parameter.shape)} put in later.",
            "it is no DTensor: it was assigned after shard",
            "change values in place, or with tpcompile.load_state_dict",
        )
    local = _local(parameter)
    if layout.dim is None or not layout.is_padded(rank):
        return local
    return local.narrow(layout.dim, 0, layout.real_length(rank))


def _local(parameter: DTensor) -> Tensor:
    """`parameter.to_local()`, which takes 100 us forward and backward."""
    if torch.compiler.is_compiling():
        return parameter.to_local()
    if not (torch.is_grad_enabled() and parameter.requires_grad):
        return local_of(parameter)
    return _Local.apply(parameter)


class _Local(torch.autograd.Function):
    """A rank's part of a parameter; the gradient is a DTensor like the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        local = local_of(parameter)
        ctx.spec, ctx.contiguous = spec_of(parameter), local.is_contiguous()
        ctx.set_materialize_grads(False)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> DTensor | None:
        (grad,), spec = grads, ctx.spec
        if grad is None:
            return None
        if ctx.contiguous and grad.is_contiguous() and not torch.is_grad_enabled():
            return dtensor_of(grad, spec)
        shape, stride = spec.shape, spec.stride
        return DTensor.from_local(grad, spec.mesh, spec.placements, shape=shape, stride=stride)


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def _check_plain(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ShardingError(
                f"cannot shard {name}: it is a DTensor already.",
                f"its placements are {list(parameter.placements)} on {parameter.device_mesh}.",
                "shard the plain model first, and apply fully_shard or others to the result.",
            )


def renew(old: nn.Parameter, value: Tensor, places: list[Slot]) -> nn.Parameter:
    """Put a new parameter with this value, and `old`'s attributes, at all places of `old`."""
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    kept = {key: value for key, value in vars(old).items() if key != _MOVED}
    vars(new).update({key: value for key, value in kept.items() if key not in vars(new)})
    for hook in (old._backward_hooks or {}).values():
        new.register_hook(hook)
    for hook in (old._post_accumulate_grad_hooks or {}).values():
        new.register_post_accumulate_grad_hook(hook)
    for slot in places:
        # Not into `_parameters`: recurrent modules keep a second list that __setattr__ updates.
        setattr(slot.module, slot.attr, new)
    return new


def _move_buffers(model: nn.Module, device_type: str) -> None:
    moved: dict[int, Tensor] = {}
    device = torch.empty(0, device=device_type).device
    for module in model.modules():
        for attr, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device.type != device_type:
                if id(buffer) not in moved:
                    moved[id(buffer)] = buffer.to(device)
                module._buffers[attr] = moved[id(buffer)]
