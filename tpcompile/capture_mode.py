"""What must be seen call by call while a forward is traced."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .capture_watch import calling_line
from .errors import CaptureError
from .torch_private import DisableTorchFunction, FakeTensor, pytree, set_grad_enabled_call

DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class TraceMode(TorchFunctionMode):
    """Keeps no_grad inside autocast, which export drops, and refuses unregistered parameters.

    Under autocast the gradient mode is set behind export's back, and what calls read is detached.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == DATA:
            # tracing loses sight of `.data`; detach shares memory and hides from autograd as well
            return args[0].detach()
        if func is set_grad_enabled_call and _is_autocast_enabled():
            with DisableTorchFunction():
                return func(*args)
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        for tensor in tensors:
            if tensor.requires_grad and not isinstance(tensor, FakeTensor):
                raise _unregistered_error(tensor)
        if not torch.is_grad_enabled() and _is_autocast_enabled():
            args, kwargs = pytree.tree_map_only(Tensor, _detached, (args, kwargs))
        return func(*args, **kwargs)


def _detached(t: Tensor) -> Tensor:
    return t.detach() if t.requires_grad else t


def _is_autocast_enabled() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def _unregistered_error(tensor: Tensor) -> CaptureError:
    return CaptureError(
        f"cannot capture a tensor {list(tensor.shape)} that needs a gradient and is no parameter.",
        f"{calling_line()}: it is not in model.named_parameters() and not an input.",
        "register it: an nn.Parameter attribute, nn.ParameterList or register_parameter.",
    )
