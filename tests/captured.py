"""What the tests of capture and of the passes on captured graphs share."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from tpcompile.passes.functionalize import functionalize
from tpcompile.passes.inline_regions import inline_regions
from tpcompile.passes.normalize import normalize

from tpcompile.capture import capture, flatten_inputs, unflatten_output
from tpcompile.program import Program
from tpcompile.structure import flatten, is_tensor


class Made(nn.Module):
    """A module from a function `forward(self, *args)` and its submodules."""

    def __init__(self, function: Callable[..., Any], **children: Any) -> None:
        super().__init__()
        self.function = function
        self.lin = nn.Linear(4, 4)
        self.register_buffer("buf", torch.linspace(0, 1, 4))
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *args, **kwargs):
        """Whatever the function returns."""
        return self.function(self, *args, **kwargs)


def made(function: Callable[..., Any], **children: Any) -> Made:
    """A `Made` in float64 with fixed weights."""
    torch.manual_seed(1)
    return Made(function, **children).double()


def normalized(model: nn.Module, *args: Any, dynamic: bool = True, **kwargs: Any) -> Program:
    """The program of a call, after the first three passes."""
    return normalize(functionalize(inline_regions(capture(model, args, kwargs, dynamic=dynamic))))


def run(program: Program, model: nn.Module, tensors: list[Tensor]) -> Any:
    """The program's output on the model's own parameters, its buffers and inputs updated."""
    state = dict(model.named_parameters(remove_duplicate=False))
    state |= dict(model.named_buffers(remove_duplicate=False))
    given = iter(tensors)
    values: dict[str, Tensor] = {}
    for node in program.placeholders():
        leaf = program.leaves[node.name]
        if leaf.kind == "input":
            values[node.name] = next(given)
        else:
            values[node.name] = leaf.tensor if leaf.kind == "constant" else state[leaf.name]
    out = fx.Interpreter(fx.GraphModule(nn.Module(), program.graph)).run(*values.values())
    with torch.no_grad():
        for name, new in zip(program.updates, out[program.n_outputs :], strict=True):
            values[name].copy_(new)
    return unflatten_output(program.out_spec, list(out[: program.n_outputs]))


def check_same(
    model: nn.Module, *args: Any, dynamic: bool = True, close: float = 1e-12, **kwargs: Any
) -> Program:
    """Assert that the normalized program does all that the model does; returns it.

    Outputs (and their types), gradients of parameters and inputs, buffers and inputs afterwards.
    """
    twin, twin_args, twin_kwargs = copy.deepcopy((model, args, kwargs))
    program = normalized(model, *args, dynamic=dynamic, **kwargs)
    tensors, _ = flatten_inputs(twin, twin_args, twin_kwargs)
    torch.manual_seed(0)
    want = model(*args, **kwargs)
    torch.manual_seed(0)
    got = run(program, twin, tensors)
    wanted, structure, _ = flatten(want, is_tensor)
    gotten, got_structure, _ = flatten(got, is_tensor)
    assert got_structure == structure
    assert type(got) is type(want)
    for a, b in zip(wanted, gotten, strict=True):
        # eager also marks what was overwritten whole, whose gradient is zero
        assert a.requires_grad or not b.requires_grad
        torch.testing.assert_close(b, a, rtol=close, atol=close)
    _backward(wanted)
    _backward(gotten)
    inputs = flatten_inputs(model, args, kwargs)[0]
    for a, b in zip([*model.parameters(), *inputs], [*twin.parameters(), *tensors], strict=True):
        torch.testing.assert_close(b, a, rtol=close, atol=close)
        if a.requires_grad:
            zero = torch.zeros_like(a)
            grads = [zero if t.grad is None else t.grad for t in (a, b)]
            torch.testing.assert_close(grads[1], grads[0], rtol=10 * close, atol=10 * close)
    for a, b in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(b, a, rtol=close, atol=close)
    return program


def _backward(outputs: list[Tensor]) -> None:
    terms = [out.square().sum() for out in outputs if out.requires_grad]
    if terms:
        torch.stack(terms).sum().backward()


def ops(program: Program) -> list[str]:
    """The op of every call, in order."""
    return [
        str(node.target).removeprefix("aten.").removesuffix(".default") for node in program.calls()
    ]


def rand(*shape: int, seed: int = 3) -> Tensor:
    """Fixed random numbers in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)
