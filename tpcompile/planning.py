"""From a model and example inputs to a planned program, before any rank is involved."""

import warnings
from collections.abc import Mapping
from time import process_time
from typing import Any

from torch import Tensor, nn

from tpcompile import pipeline
from tpcompile.capture import capture
from tpcompile.errors import InputError, UnsupportedOpError
from tpcompile.hf import example_inputs_for
from tpcompile.ops.replicated import REPLICATED
from tpcompile.pipeline import OwnPasses
from tpcompile.plain_sizes import write_plain_sizes
from tpcompile.program import Program

Inputs = Mapping[str, Any] | tuple[Any, ...] | list[Any] | Tensor | None


def arguments_of(
    model: nn.Module, example_inputs: Inputs
) -> tuple[tuple[Any, ...], dict[str, Any]]:
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
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    passes: OwnPasses | None = None,
    dumps: bool = False,
) -> Program:
    """The normalized program of one call; `passes` are a user's, for the whole pipeline."""
    own = pipeline.own_passes(passes)
    begin = process_time()
    program = capture(model, args, kwargs)
    if program.symbols and not write_plain_sizes(program):
        program = capture(model, args, kwargs, dynamic=False)
        program.notes.append("input sizes are fixed: the model computes sizes by division")
    program.extra["model"] = type(model).__name__
    program.extra["own_passes"] = own
    program.extra["capture_seconds"] = process_time() - begin
    program.extra["block_paths"] = block_paths(model)
    program.extra.update(_plain_names(model, args, kwargs))
    return pipeline.run(program, pipeline.NORMALIZE, dumps=dumps)


def _plain_names(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
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
            if (
                next(child.children(), None) is not None
                and next(child.parameters(), None) is not None
            ):
                found.add(f"{path}.{name}" if path else name)
    return found


def check_rules(program: Program, *, strict: bool) -> None:
    """Warn of, or with `strict` refuse, ops without a rule; list them for the plan."""
    from tpcompile.problem import Assignment

    plan: Assignment = program.extra["assignment"]
    bare = [node for node in plan.strategies if node.meta.get("rule") is None]
    program.extra["replicated_ops"] = tuple(
        (str(node.target), node.meta.get("path", "")) for node in bare
    )
    # Without a gradient it is bookkeeping (tokens counted by expert) that costs next to nothing.
    trained = program.extra["facts"].trained
    bare = [node for node in bare if node in trained or node.target not in REPLICATED]
    if not bare:
        return
    named = sorted({f"{node.target} in {node.meta.get('path') or 'the root'}" for node in bare})
    if strict:
        raise UnsupportedOpError(
            "strict=True asks that every op has a sharding rule",
            f"there is none for {', '.join(named[:5])}"
            + (f" and {len(named) - 5} more" if len(named) > 5 else ""),
            "register a rule (tpcompile.register_rule), or drop strict=True to replicate them",
        )
    warnings.warn(f"tpcompile replicates {', '.join(named[:5])}: no rule", stacklevel=3)
