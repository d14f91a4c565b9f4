"""From a model and example inputs to a planned program, before any rank is involved."""

import fnmatch
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, fx, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from tpcompile import pipeline
from tpcompile.capture import capture
from tpcompile.dims import Dim, contains, ordered
from tpcompile.errors import InputError, ShardingError, UnsupportedOpError
from tpcompile.hf import example_inputs_for
from tpcompile.placement import R, State, state_text
from tpcompile.program import Program, is_dynamic, values
from tpcompile.storage import ParamLayout
from tpcompile.strategies import Choices

Inputs = Mapping[str, Any] | tuple[Any, ...] | list[Any] | Tensor | None
Pin = Callable[[fx.Node, list[State], Choices], list[State]]
"""(parameter, its states, choices) -> the states that remain."""


def arguments_of(model: nn.Module, example_inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of the forward call that `example_inputs` stands for.

    Raises:
        InputError: None was given and the model is not a Hugging Face model.
    """
    if example_inputs is None:
        return (), example_inputs_for(model)
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    raise InputError(
        f"example_inputs={type(example_inputs).__name__} for {type(model).__name__}.forward",
        "it is neither a dict of keyword arguments, a tuple of positional ones, nor a tensor",
        'pass what the forward takes, such as example_inputs={"x": torch.randn(2, 8, 32)}',
    )


def captured(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, dumps: bool = False
) -> Program:
    """The normalized program of one call."""
    program = capture(model, args, kwargs)
    if program.symbols and not _has_plain_sizes(program):
        program = capture(model, args, kwargs, dynamic=False)
        program.notes.append("input sizes are fixed: the model computes sizes by division")
    program.extra["block_paths"] = block_paths(model)
    program.extra.update(_plain_names(model, args, kwargs))
    return pipeline.run(program, pipeline.NORMALIZE, dumps=dumps)


def _has_plain_sizes(program: Program) -> bool:
    """Whether all symbolic sizes are sums of products, which is what naming can code."""
    exprs = {
        size.node.expr
        for node in program.graph.nodes
        for value in values(node)
        for size in value.shape
        if is_dynamic(size)
    }
    return all(expr.is_polynomial() for expr in exprs)


def _plain_names(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Names of tensor arguments where all are plain, for a lookup torch.compile can trace."""
    import inspect

    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    return {
        "input_names": tuple(n for n, v in bound.items() if isinstance(v, Tensor)),
        "positional": tuple(inspect.signature(model.forward).parameters),
    }


def block_paths(model: nn.Module) -> set[str]:
    """Paths of the outermost repeated blocks: children, with children, of a container."""
    found: set[str] = set()
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            continue
        if any(path == f or path.startswith(f + ".") for f in found):
            continue
        for name, child in module.named_children():
            if next(child.children(), None) is not None and next(child.parameters(), None) is not None:
                found.add(f"{path}.{name}" if path else name)
    return found


def pins_from_plan(model: nn.Module, plan: Mapping[str, Placement] | None) -> dict[str, Pin]:
    """Pins by parameter name from a `plan=` of name patterns.

    Raises:
        ShardingError: A pattern names no parameter, or a placement is not Shard or Replicate.
    """
    pins: dict[str, Pin] = {}
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern, placement in (plan or {}).items():
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise ShardingError(
                f"plan= places {pattern!r}",
                f"no parameter of {type(model).__name__} has that name",
                f"names look like {names[0]!r}; * matches any part of a name",
            )
        pins.update(dict.fromkeys(matching, _pin(pattern, placement)))
    return pins


def _pin(pattern: str, placement: Placement) -> Pin:
    if not isinstance(placement, (Shard, Replicate)):
        raise ShardingError(
            f"plan= places {pattern!r} as {placement!r}",
            "a parameter can be Shard(dim) or Replicate()",
            "use one of torch.distributed.tensor's Shard and Replicate",
        )

    def keep(node: fx.Node, states: list[State], choices: Choices) -> list[State]:
        if isinstance(placement, Replicate):
            return [R]
        dims = node.meta["dims"][0]
        dim = placement.dim % max(len(dims), 1)
        wanted = dims[dim] if dim < len(dims) else None
        kept = [s for s in states if isinstance(s, Dim) and wanted is not None and contains(wanted, s)]
        if not kept:
            raise _unmet(node, pattern, placement, choices)
        return kept

    return keep


def _unmet(node: fx.Node, pattern: str, placement: Shard, choices: Choices) -> ShardingError:
    shape = list(node.meta["val"].shape)
    dims = node.meta["dims"][0]
    reasons = [
        f"{state_text(atom)}: {choices.unusable(atom)}"
        for atom in ordered(choices.atoms.leaves(dims[placement.dim]))
        if choices.unusable(atom)
    ] if placement.dim < len(dims) else [f"it has {len(dims)} dims"]
    found = "; ".join(reasons) or "no part of that dim can be dealt out in this model"
    return ShardingError(
        f"plan= asks for {pattern!r} as Shard({placement.dim}), shape {shape}, "
        f"on {choices.cost.size} ranks",
        found,
        "use a degree that divides it, or drop it from plan= and let tpcompile choose",
    )


def pins_from_layouts(layouts: Mapping[str, ParamLayout]) -> dict[str, Pin]:
    """Pins that keep every parameter stored as it is, for another capture of a sharded model."""
    return {name: _as_stored(layout) for name, layout in layouts.items()}


def _as_stored(layout: ParamLayout) -> Pin:
    from tpcompile.passes.localize import layout_for

    def keep(node: fx.Node, states: list[State], choices: Choices) -> list[State]:
        same = [s for s in states if layout_for(node, s, choices.sizes, layout.size) == layout]
        assert same, f"{node}: no state is stored as {layout}"
        return same

    return keep


def check_rules(program: Program, *, strict: bool) -> None:
    """Warn of, or with `strict` refuse, ops without a rule; list them for the plan."""
    from tpcompile.passes.assign_placements import Assignment

    plan: Assignment = program.extra["assignment"]
    bare = [
        (str(node.target), node.meta.get("path", ""))
        for node in plan.strategies
        if node.meta.get("rule") is None
    ]
    program.extra["replicated_ops"] = tuple(bare)
    if not bare:
        return
    named = sorted({f"{op} in {path or 'the root'}" for op, path in bare})
    if strict:
        raise UnsupportedOpError(
            "strict=True asks that every op has a sharding rule",
            f"{len(named)} have none: {', '.join(named[:5])}",
            "register a rule (tpcompile.rule.rule), or drop strict=True to replicate them",
        )
    warnings.warn(f"tpcompile replicates {', '.join(named[:5])}: no rule", stacklevel=3)
