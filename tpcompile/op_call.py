"""A call of an op with its gradients, for `check_rule`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tpcompile.ops.equations import tensors_of
from tpcompile.rank_split import RankSplit
from tpcompile.rule import Rule


@dataclass(frozen=True)
class Result:
    """What a call gave."""

    outs: list[Tensor]
    grads: list[Tensor | None]


@dataclass(frozen=True)
class OpCall:
    """An op, or its local rewrite, with its arguments."""

    op: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    trained: frozenset[int] = frozenset()
    """Operands whose gradients are compared."""

    def tensors(self) -> list[Tensor]:
        """Tensor operands in argument order, lists flattened."""
        return tensors_of((*self.args, *self.kwargs.values()))

    def with_tensors(self, tensors: Sequence[Tensor]) -> "OpCall":
        """The same call on other tensors."""
        it = iter(tensors)
        args = [_replace(arg, it) for arg in self.args]
        kwargs = {name: _replace(arg, it) for name, arg in self.kwargs.items()}
        return replace(self, args=args, kwargs=kwargs)

    def localized(self, rule: Rule, split: RankSplit) -> "OpCall":
        """The call to make on one rank."""
        if rule.local is None:
            return self
        op, args, kwargs = rule.local(split, *self.args, **self.kwargs)
        return OpCall(op, list(args), dict(kwargs))

    def run(
        self,
        weights: Callable[[int, Tensor], Tensor] | None = None,
        localize: Callable[["OpCall"], "OpCall"] | None = None,
    ) -> Result:
        """Outputs, and gradients of `sum(output * weight)` in every floating operand."""
        leaves = [
            t.detach().requires_grad_(i in self.trained) for i, t in enumerate(self.tensors())
        ]
        # In-place ops may not write to a leaf.
        call = self.with_tensors([leaf.clone() for leaf in leaves])
        call = localize(call) if localize else call
        torch.manual_seed(0)
        outs = tensors_of([call.op(*call.args, **call.kwargs)])
        live = [(i, out) for i, out in enumerate(outs) if out.requires_grad]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        grads: dict[int, Tensor | None] = {}
        if live and wanted:
            found = torch.autograd.grad(
                [out for _, out in live],
                wanted,
                [(weights or weight_for)(i, out) for i, out in live],
                allow_unused=True,
            )
            grads = {id(leaf): grad for leaf, grad in zip(wanted, found, strict=True)}
        return Result([out.detach() for out in outs], [grads.get(id(leaf)) for leaf in leaves])


def trained_call(call: OpCall) -> OpCall:
    """The call with all operands trained that the op can differentiate with respect to."""
    floating = [i for i, x in enumerate(call.tensors()) if x.is_floating_point() or x.is_complex()]

    def works(trained: Iterable[int]) -> bool:
        try:
            replace(call, trained=frozenset(trained)).run()
        except RuntimeError as error:
            if "differentiable" in str(error) or "derivative" in str(error):
                return False
            raise
        return True

    trained = floating if works(floating) else [i for i in floating if works([i])]
    return replace(call, trained=frozenset(trained))


def weight_for(i: int, out: Tensor) -> Tensor:
    """Fixed random numbers of the shape of output i."""
    generator = torch.Generator().manual_seed(i + 2)
    return torch.randn(out.shape, generator=generator, dtype=out.dtype).to(out.device)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a float type, or the complex one of its width; integers stay."""
    if x.is_complex():
        return x.to(dtype.to_complex())
    return x.to(dtype) if x.is_floating_point() else x


def _replace(arg: Any, tensors: Any) -> Any:
    if isinstance(arg, Tensor):
        return next(tensors)
    return [_replace(a, tensors) for a in arg] if isinstance(arg, (list, tuple)) else arg
