"""Trace an unmodified model into one graph of ATen training ops."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .caches import caches_in
from .capture_inputs import (
    SizeGroups,
    autocast_state,
    bind,
    flatten_inputs,
    size_groups,
    unify_sizes,
)
from .capture_mode import TraceMode
from .capture_output import OutputSpec, take_output
from .capture_program import program_from_export
from .capture_watch import Watch, user_line, watch_forward
from .errors import CaptureError
from .program import Program
from .quiet import quiet
from .refusals import check_module
from .structure import Flat, is_tensor
from .torch_private import lengths_of_one

__all__ = ["capture", "flatten_inputs", "unflatten_output"]


def capture(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, dynamic: bool = True
) -> Program:
    """The program of `model(*args, **kwargs)`, in the model's train or eval state.

    With `dynamic`, the first two dims of every input may vary where tracing does not fix them
    (`size_check` tells whether other inputs fit).  Parameters may be on the meta device.  The model
    is left as it was.

    Raises:
        InputError: The arguments do not fit the forward's signature.
        CaptureError: The forward cannot be traced into one graph.
    """
    check_module(model)
    bound = bind(model, args, kwargs)
    attempts = [(True, False), (False, False), (True, True), (False, True)]
    first = plain = None
    for is_dynamic, strict in attempts:
        if is_dynamic and not dynamic:
            continue
        try:
            program = _trace(model, bound, is_dynamic, strict)
        except CaptureError:
            raise
        except Exception as error:
            first = first or error
            if not (is_dynamic or strict):
                plain = error  # speaks of the user's code and of real sizes
            continue
        if dynamic and not is_dynamic:
            program.notes.append(f"input sizes are fixed: {_first_line(first)}")
        return program
    raise _capture_error(model, plain) from plain


def unflatten_output(out_spec: OutputSpec, tensors: list[Any]) -> Any:
    """The user's output, of the type that the model returns, from the flat tensors."""
    return out_spec.rebuild(tensors)


class _Flat(nn.Module):
    """The model as a function of flat tensors, so that every structure is ours to keep."""

    def __init__(self, model: nn.Module, bound: Flat, groups: list[SizeGroups] | None) -> None:
        super().__init__()
        self.model = model
        self.structure = bound.structure
        self.groups = groups
        self.caches: list[Any] = []
        self.autocast: tuple[tuple[str, torch.dtype], ...] = ()

    def forward(self, tensors: list[Tensor]) -> Any:
        if self.groups is not None:
            unify_sizes(tensors, self.groups)
        args, kwargs = self.structure.unflatten(iter(tensors))
        self.caches[:] = caches_in((args, kwargs))
        with ExitStack() as stack:
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype))
            return self.model(*args, **kwargs)


class _FlatOutput(_Flat):
    """Flat outputs as well; `found` gets their structure."""

    found: list[OutputSpec]
    assigned: list[str]
    kept: list[str]
    """Attributes that the forward sets to tensors."""

    def forward(self, tensors: list[Tensor]) -> Any:
        owners = [(name, m, dict(m._buffers)) for name, m in self.model.named_modules()]
        before = {name: dict(vars(module)) for name, module, _ in owners}
        with TraceMode():
            output = super().forward(tensors)
        leaves, spec = take_output(output, self.caches, tensors)
        if not all(map(is_tensor, leaves)):
            raise ValueError("the output holds an input's size, which is a number")
        self.found[:] = [spec]
        self.kept = [
            f"{name}.{key}" if name else key
            for name, module, _ in owners
            for key, value in vars(module).items()
            if is_tensor(value) and before[name].get(key) is not value
        ]
        self.assigned.clear()
        for name, module, buffers in owners:
            for key, old in buffers.items():
                new = module._buffers[key]
                if new is not old:
                    # `self.buffer = self.buffer + 1`: export would drop it
                    self.assigned.append(f"{name}.{key}" if name else key)
                    leaves.append(_same_kind(new, old, self.assigned[-1]))
                    module._buffers[key] = old
        return leaves


def _trace(
    model: nn.Module,
    bound: Flat,
    dynamic: bool,
    strict: bool,
) -> Program:
    tensors: list[Tensor] = bound.leaves
    groups = size_groups(bound)
    wrapper = (_Flat if strict else _FlatOutput)(model, bound, groups if dynamic else None)
    found: list[OutputSpec] = []
    assigned: list[str] = []
    if isinstance(wrapper, _FlatOutput):
        wrapper.found, wrapper.assigned = found, assigned
    wrapper.autocast = autocast_state(tensors)
    with (
        watch_forward(model) as watch,
        lengths_of_one() if bound.caches else nullcontext(),
        _plain_context(wrapper.autocast),
        _one_device(model, strict) as to,
    ):
        # Aliases: export marks its inputs, and a static attempt after a dynamic one would not be.
        inputs = [
            t.detach().requires_grad_(t.requires_grad) for t in _distinct([to(t) for t in tensors])
        ]
        exported = _export(wrapper, inputs, groups if dynamic else None, strict)
    spec = found[0] if found else None
    program = program_from_export(exported, model, bound.paths, spec, assigned)
    _note_caches(program, bound, groups)
    program.notes += _notes(watch)
    program.extra["assigned"] = tuple(getattr(wrapper, "kept", ()))
    return program


def _note_caches(program: Program, bound: Flat, groups: list[SizeGroups]) -> None:
    """Which inputs are in caches, and which of their dims are lengths."""
    names = [node.name for node in program.placeholders("input")]
    read = zip(names, bound.entries, strict=True)
    program.extra["cache_inputs"] = {name: entry for name, entry in read if entry}
    program.extra["lengths"] = {
        (name, dim)
        for name, dims in zip(names, groups, strict=True)
        for dim, group in dims.items()
        if group.startswith("length")
    }


def _distinct(tensors: list[Tensor]) -> list[Tensor]:
    """Copies in place of repeats: export would read one input wherever either is read."""
    seen: set[int] = set()
    found = []
    for t in tensors:
        found.append(t.detach().clone().requires_grad_(t.requires_grad) if id(t) in seen else t)
        seen.add(id(t))
    return found


def _export(
    wrapper: nn.Module, inputs: list[Tensor], groups: list[SizeGroups] | None, strict: bool
) -> torch.export.ExportedProgram:
    auto = torch.export.Dim.AUTO
    dims = [dict.fromkeys(each, auto) or None for each in groups or ()]
    with quiet():
        return torch.export.export(
            wrapper,
            (inputs,),
            dynamic_shapes=None if groups is None else {"tensors": dims},
            strict=strict,
        )


@contextmanager
def _plain_context(autocast: tuple[tuple[str, torch.dtype], ...]) -> Iterator[None]:
    """Gradients on, and autocast off: the wrapper turns it on where the graph can see it."""
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        for kind, _ in autocast:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def _one_device(model: nn.Module, strict: bool) -> Iterator[Any]:
    """Move what is not on meta there for a while, if any parameter is; gives the move.

    Also where a parameter's memory has been freed: strict capture clones the values.
    """
    state = [*model.parameters(), *model.buffers()]
    if not any(t.is_meta or (strict and _is_freed(t)) for t in state):
        yield lambda t: t
        return
    moved: dict[int, Tensor] = {}

    def to_meta(t: Tensor) -> Tensor:
        if id(t) not in moved:
            new = t.detach().to("meta").requires_grad_(t.requires_grad)
            moved[id(t)] = nn.Parameter(new, t.requires_grad) if _is_parameter(t) else new
        return t if t.is_meta else moved[id(t)]

    # watch_forward puts the registries back
    for module in model.modules():
        registries: list[dict[str, Any]] = [module._parameters, module._buffers]
        for registry in registries:
            registry.update({k: to_meta(t) for k, t in registry.items() if t is not None})
    yield to_meta


def _same_kind(new: Tensor | None, old: Tensor | None, name: str) -> Tensor:
    if old is None or new is None or (new.dtype, new.shape) != (old.dtype, old.shape):
        raise CaptureError(
            f"cannot capture an assignment that changes what the buffer {name} is.",
            f"it is {_kind(old)} before forward and {_kind(new)} after.",
            "register the buffer with its final shape and dtype, and assign values to it.",
        )
    return new


def _kind(t: Tensor | None) -> str:
    return "None" if t is None else f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


def _is_freed(t: Tensor) -> bool:
    return t.numel() > 0 and t.untyped_storage().nbytes() == 0


def _is_parameter(t: Tensor) -> bool:
    return isinstance(t, nn.Parameter)


def _notes(watch: Watch) -> list[str]:
    notes = []
    if watch.checkpointed:
        notes.append(
            "torch.utils.checkpoint inside the model has no effect: gradients are the same, "
            "activations are kept; wrap the sharded blocks instead"
        )
    if watch.assigned:
        notes.append(f"forward sets attributes that stay as they were: {', '.join(watch.assigned)}")
    return notes


def _first_line(error: Exception | None) -> str:
    return str(error).strip().split("\n", 1)[0]


def _capture_error(model: nn.Module, error: Exception | None) -> CaptureError:
    line = user_line(error) if error else ""
    kind = type(error).__name__
    fix = "see that model(...) runs by itself on these inputs, and write this with plain torch ops."
    if "DataDependent" in kind or "UserError" in kind:
        fix = (
            "replace Python control flow on tensor values by torch.where or masks, and sizes that "
            "depend on values by fixed ones."
        )
    return CaptureError(
        f"cannot capture {type(model).__name__} into one graph.",
        f"{f'{line}: ' if line else ''}{kind}: {_first_line(error)}",
        fix,
    )
