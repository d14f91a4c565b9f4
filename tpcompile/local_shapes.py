"""Run a model's own code on one rank's parts, to see whether it computes with the parts' sizes.

Named dims say which ops may be split, not what numbers the Python code puts into their arguments:
`x.view(b, -1, self.num_heads, d)` runs on half the heads and mixes up tokens.  So the model with
cut weights is captured too, and every value must have the shape that the split says.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from tpcompile import pipeline
from tpcompile.capture import capture
from tpcompile.cost import hint
from tpcompile.dims import Atoms, Dim
from tpcompile.errors import TpcompileError
from tpcompile.module_styles import STYLES, Conflict, Flow, Held, folded
from tpcompile.program import Program, operands, values

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def fixed_capture(model: nn.Module, arguments: Arguments) -> Program:
    """The captured program of one call, for its sizes alone: so that all are numbers."""
    args, kwargs = arguments
    return capture(model, args, kwargs, dynamic=False)


def local_conflicts(
    model: nn.Module,
    arguments: Arguments,
    program: Program,
    styles: Mapping[str, str],
    flow: Flow,
    size: int,
) -> list[Conflict]:
    """Where the model's code goes wrong on the parts that `styles` gives it; [] if nowhere."""
    groups = _groups(styles, flow)
    everything = frozenset[str]().union(*groups)
    if not everything:
        return []
    try:
        local = fixed_capture(_with_cut_weights(model, styles, everything, size), arguments)
        local = pipeline.run(local, pipeline.NORMALIZE)
        return _shape_conflicts(program, local, styles, flow, size)
    except TpcompileError as error:
        failed, last = [], error
    for group in groups if len(groups) > 1 else []:
        try:
            fixed_capture(_with_cut_weights(model, styles, group, size), arguments)
        except TpcompileError as error:
            failed.append(_failure(group, error))
    return failed or [_failure(everything, last)]


def _groups(styles: Mapping[str, str], flow: Flow) -> list[frozenset[str]]:
    """Modules that work on parts, together with those on the same named dim, layers as one."""
    by_atom: dict[Dim, set[str]] = defaultdict(set)
    for module, atom in flow.atoms.items():
        if atom is not None and "part" in (
            STYLES[styles[module]].takes,
            STYLES[styles[module]].gives,
        ):
            by_atom[atom].add(module)
    alike: dict[frozenset[str], set[str]] = defaultdict(set)
    for modules in by_atom.values():
        alike[frozenset(map(folded, modules))] |= modules
    return [frozenset(modules) for modules in alike.values()]


def _failure(modules: frozenset[str], error: TpcompileError) -> Conflict:
    """A conflict that quotes what the model's own code said."""
    said = str(error.__cause__ or error.found).strip().splitlines()[0]
    path = min(modules).rpartition(".")[0]
    return Conflict(path, "", f"its code fails on a rank's part: {said}", modules)


def _with_cut_weights(
    model: nn.Module, styles: Mapping[str, str], modules: frozenset[str], size: int
) -> nn.Module:
    """A copy without memory, the weights of `modules` cut to one rank's part."""
    stand_ins: dict[int, Any] = {id(p): _bare(p, tuple(p.shape)) for p in model.parameters()}
    for name in modules:
        style, module = STYLES[styles[name]], model.get_submodule(name)
        for short, parameter in module.named_parameters(recurse=False):
            shape = list(parameter.shape)
            if short == "weight" or style.dim == 0:
                shape[style.dim] //= size  # type: ignore[index]
            stand_ins[id(parameter)] = _bare(parameter, tuple(shape))
    return copy.deepcopy(model, stand_ins)


def _bare(parameter: nn.Parameter, shape: tuple[int, ...]) -> nn.Parameter:
    # Memory that is never written takes no pages; storage that is freed crashes Dynamo's capture.
    empty = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
    return nn.Parameter(empty, parameter.requires_grad)


def _shape_conflicts(
    program: Program, local: Program, styles: Mapping[str, str], flow: Flow, size: int
) -> list[Conflict]:
    """Values of the rank's program that have another shape than their part should have."""
    atoms, found = Atoms(), []
    whole_ones = {m for m, style in styles.items() if STYLES[style].gathers()}
    weights = program.extra["facts"].only_parameters
    for mine, theirs in zip(program.calls(), local.calls(), strict=False):
        if mine.target != theirs.target or mine.meta.get("path") != theirs.meta.get("path"):
            found.append(_conflict(mine, flow, "its code takes another way on a rank's part"))
            break
        for i, (whole, part) in enumerate(zip(values(mine), values(theirs), strict=True)):
            # A gathering module is not cut here, so that it hands out what it will.
            cut = mine.meta.get("path") not in whole_ones
            held = flow.held[mine][i] if cut and flow.held.get(mine) else None
            want, got = _expected(mine, i, whole, held, atoms, size), list(map(hint, part.shape))
            if want != got and mine not in weights:
                op = str(mine.target).removeprefix("aten.").split(".")[0]
                text = f"{op} gives {got} on a rank's part, not {want}: its sizes are fixed"
                found.append(_conflict(mine, flow, text))
    return found


def _expected(
    node: fx.Node, index: int, whole: Tensor, held: Held | None, atoms: Atoms, size: int
) -> list[int]:
    dims = node.meta["dims"][index] if node.meta.get("dims") else ()
    sizes = list(map(hint, whole.shape))
    if held is None or held.atom is None:
        return sizes
    return [
        n // size if held.atom in atoms.leaves(dim) else n
        for n, dim in zip(sizes, dims, strict=True)
    ]


def _conflict(node: fx.Node, flow: Flow, reason: str) -> Conflict:
    held = [h for n in (node, *operands(node)) for h in flow.held.get(n, []) if h is not None]
    sources = frozenset[str]().union(*(h.sources for h in held))
    if not sources:
        sources = frozenset(m for m, atom in flow.atoms.items() if atom is not None)
    return Conflict(node.meta.get("path", ""), node.meta.get("where", ""), reason, sources)
