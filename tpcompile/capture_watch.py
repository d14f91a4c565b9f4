"""Watch what a forward does while it is traced that the graph cannot show."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from .custom_function import elementwise_op
from .errors import CaptureError
from .refusals import refuse_while_tracing
from .torch_private import apply_function, checkpoint_hook, set_checkpoint_hook, set_function_apply

SKIPPED = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
"""Files that are not the user's model: torch, this package, generated code."""


@dataclass
class Watch:
    """What was seen."""

    checkpointed: bool = False
    assigned: list[str] = field(default_factory=list)
    """Attributes that the forward set, as `layers.0.last_output`."""


@contextmanager
def watch_forward(model: nn.Module) -> Iterator[Watch]:
    """Trace inside this: checkpoints and assignments are noted, custom autograd functions seen.

    Of those, one that does not map elements to elements raises.

    The model's attributes are afterwards what they were before.
    """
    watch = Watch()
    before = [(name, module, _attributes(module)) for name, module in model.named_modules()]
    containers = [pair for module in model.modules() for pair in _containers(module)]
    hook = checkpoint_hook()

    def checkpoint(*args: Any, **kwargs: Any) -> Any:
        watch.checkpointed = True
        return hook(*args, **kwargs)

    def guarded_apply(cls: Any, *args: Any) -> Any:
        if cls is CheckpointFunction:
            watch.checkpointed = True
            return args[0](*args[2:])
        if cls.__module__.startswith("torch."):
            return apply_function(cls, *args)
        op = elementwise_op(cls, args)
        if op is None:
            raise _function_error(cls)
        return op([arg for arg in args if isinstance(arg, Tensor)])

    set_checkpoint_hook(checkpoint)
    set_function_apply(guarded_apply)
    try:
        with refuse_while_tracing(calling_line):
            yield watch
    finally:
        set_function_apply(None)
        set_checkpoint_hook(hook)
        for name, module, attributes in before:
            watch.assigned += _restore(name, module, attributes)
        _refill(containers)


def user_line(error: BaseException) -> str:
    """Innermost frame of the user's model, as `file.py:12 in forward: the code`, or ""."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        seen.append(current)
        current = current.__cause__ or current.__context__
    for each in reversed(seen):
        if line := _line_of(each.__traceback__):
            return line
    return ""


def is_user_file(filename: str) -> bool:
    """Whether a file may be the user's model (or a model library), not torch or tpcompile."""
    return not filename.startswith(SKIPPED)


def _line_of(tb: TracebackType | None) -> str:
    frames = [f for f in traceback.extract_tb(tb) if is_user_file(f.filename)]
    inside = [i for i, f in enumerate(frames) if f.name not in ("<module>",)]
    return _text(frames[inside[-1]]) if inside else ""


def _text(frame: traceback.FrameSummary) -> str:
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}: {frame.line}"


def calling_line() -> str:
    """The innermost line of the user's model that is running, as `user_line` spells it."""
    frames = [f for f in traceback.extract_stack() if is_user_file(f.filename)]
    return _text(frames[-1])


def _function_error(cls: type) -> CaptureError:
    return CaptureError(
        f"cannot capture the custom autograd function {cls.__name__}.",
        f"{calling_line()}: capture keeps its forward and would lose its backward.",
        f"write {cls.__name__} with plain torch ops, or as a torch.library.custom_op with "
        "register_autograd.",
    )


def _is_registry(key: str) -> bool:
    """Whether a module keeps its parameters, buffers, children or hooks under this name."""
    return key in ("_parameters", "_buffers", "_modules") or key.endswith("_hooks")


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The module's attributes, with copies of its own registries."""
    return {
        k: dict(v) if _is_registry(k) and isinstance(v, dict) else v
        for k, v in vars(module).items()
    }


def _containers(module: nn.Module) -> list[tuple[Any, Any]]:
    """Plain dicts and lists of a module, such as caches, with copies of them."""
    return [
        (v, v.copy())
        for k, v in vars(module).items()
        if type(v) in (dict, list) and not _is_registry(k)
    ]


def _refill(containers: list[tuple[Any, Any]]) -> None:
    """Take out again what a trace has put in: its tensors are of no use later."""
    for container, copy in containers:
        if isinstance(container, dict):
            container.clear()
            container.update(copy)
        else:
            container[:] = copy


def _restore(name: str, module: nn.Module, attributes: dict[str, Any]) -> list[str]:
    """Put attributes back; the dotted names of those that a forward had set."""
    now = vars(module)
    changed = [key for key in now if key not in attributes]
    for key in changed:
        del now[key]
    for key, value in attributes.items():
        if _is_registry(key) and isinstance(now.get(key), dict):
            registry = now[key]
            if list(registry) != list(value) or any(registry[k] is not value[k] for k in value):
                registry.clear()
                registry.update(value)
        elif key not in now or now[key] is not value:
            if _is_changed(now.get(key), value):
                changed.append(key)
            now[key] = value
    return [f"{name}.{key}" if name else key for key in changed if not key.startswith("_")]


def _is_changed(new: Any, old: Any) -> bool:
    """Whether a forward assigned it: export itself rebuilds containers that are equal."""
    plain = (str, int, float, bool, type(None))
    return isinstance(new, Tensor) or (isinstance(new, plain) and new != old)
