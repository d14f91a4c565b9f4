"""Find the plan of module styles nearest to a plan of tpcompile that computes the right thing."""

import inspect
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tpcompile import pipeline
from tpcompile.cost import CostModel
from tpcompile.follow_styles import follow
from tpcompile.hardware import Hardware
from tpcompile.local_shapes import fixed_capture, local_conflicts
from tpcompile.module_styles import GATHERED, GRADIENT, STYLES, Conflict, Flow, folded
from tpcompile.passes.find_dims import find_dims
from tpcompile.passes.name_dims import name_dims
from tpcompile.plan import Plan
from tpcompile.planning import Inputs, arguments_of
from tpcompile.profiles import DEFAULT
from tpcompile.program import Program, operands

TAME = ("colwise", "packed_colwise", "colwise_gather_output"), ("rowwise", "rowwise_split_input")
"""Styles of one weight dim, each with fewer demands on the code around it than the one before."""


@dataclass
class Search:
    """A plan of styles and why it says less than it was to."""

    styles: dict[str, str]
    """By full module name."""
    left: dict[str, str] = field(default_factory=dict)
    """Parameter that is left whole -> why."""
    gathered: dict[str, str] = field(default_factory=dict)
    """Module that takes or hands out whole values -> why."""
    flow: Flow = field(default_factory=Flow)


@dataclass
class StyledModel:
    """A captured model with its dims named: what a plan of styles is followed through."""

    module: nn.Module
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    program: Program
    written: dict[str, str] = field(default_factory=dict)
    """Module whose output the code changes in place -> where."""
    names: dict[str, str] = field(default_factory=dict)
    """Every name of a parameter -> its first."""

    @classmethod
    def of(cls, module: nn.Module, example_inputs: Inputs) -> "StyledModel":
        """Capture a model."""
        arguments = arguments_of(module, example_inputs)
        program = fixed_capture(module, arguments)
        written = _written_outputs(program)
        program = pipeline.run(program, [*pipeline.NORMALIZE, name_dims, find_dims])
        first: dict[int, str] = {}
        names = {
            name: first.setdefault(id(parameter), name)
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }
        return cls(module, arguments, program, written, names)

    def follow(self, styles: Mapping[str, str], size: int, hardware: Hardware = DEFAULT) -> Flow:
        """Follow a plan of styles, by full module name, through the graph."""
        return follow(self.program, styles, CostModel(size, hardware))

    def conflicts(self, styles: Mapping[str, str], size: int) -> list[Conflict]:
        """Everything that is wrong with a plan of styles."""
        flow = self.follow(styles, size)
        if flow.conflicts:
            return flow.conflicts
        return local_conflicts(self.module, self.arguments, self.program, styles, flow, size)

    def is_pair(self, module: str) -> bool:
        """Whether a weight without bias is two equal halves that are used side by side."""
        if getattr(self.module.get_submodule(module), "bias", None) is not None:
            return False
        first = self.names[f"{module}.weight"]
        for node in self.program.placeholders("parameter"):
            if self.program.leaves[node.name].name == first:
                dim = node.meta["dims"][0][0]
                terms = dim.root().terms if dim is not None else None
                return bool(terms) and len(terms) == 2 and terms[0].root() is terms[1].root()
        return False


def _written_outputs(program: Program) -> dict[str, str]:
    """Module -> where something else changes the module's output in place."""
    found = {}
    for node in program.calls():
        schema = getattr(node.target, "_schema", None)
        inputs = operands(node)
        if schema is not None and schema.is_mutable and inputs:
            path = inputs[0].meta.get("path", "")
            if path != node.meta.get("path", ""):
                found[path] = node.meta.get("where", "")
    return found


def settle(plan: Plan, read: StyledModel, *, packed: bool) -> Search:
    """The styles for a plan; `packed`: there is a style for weights fused of two halves."""
    search = _first(plan, read)
    for module in {*search.styles} - read.follow(search.styles, plan.size).applied:
        del search.styles[module]
        search.left[f"{module}.weight"] = "its forward does not run as a plain linear or lookup"
    _unify(search, read.module)
    while conflicts := read.conflicts(search.styles, plan.size):
        # A row module that gets a whole value may get its part once another one is tamed.
        first: dict[str, Conflict] = {}
        for conflict in [c for c in conflicts if c.kind == "part"] or conflicts:
            for module in conflict.modules:
                first.setdefault(module, conflict)
        for module, conflict in first.items():
            _tame(search, read, module, conflict, packed)
        _unify(search, read.module)
    search.flow = read.follow(search.styles, plan.size)
    whole = {module for module, style in search.styles.items() if style in GATHERED.values()}
    search.gathered = {module: why for module, why in search.gathered.items() if module in whole}
    return search


def _first(plan: Plan, read: StyledModel) -> Search:
    """The word for how each parameter is split, where there is one."""
    rows = {p.name: p for p in plan.parameters if p.shape != p.local}
    search = Search({})
    for name, first in read.names.items():
        row = rows.get(first)
        module_name, _, short = name.rpartition(".")
        if row is None or short == "bias":
            continue
        module = read.module.get_submodule(module_name)
        dim = next(i for i, (a, b) in enumerate(zip(row.shape, row.local, strict=True)) if a != b)
        style = module_style(module, short, dim)
        if style in STYLES:
            search.styles[module_name] = style
        else:
            search.left[name] = style
    return search


def module_style(module: nn.Module, short: str, dim: int) -> str:
    """The word for a module whose parameter is split along `dim`, or why there is none."""
    kind = type(module).__name__
    words = {
        nn.Linear: ("colwise", "rowwise"),
        nn.Embedding: ("embedding_rowwise", "embedding_colwise"),
    }
    base = next((cls for cls in words if isinstance(module, cls)), None)
    if short != "weight":
        return "styles are for modules with a weight, not for a parameter beside one"
    if base is None:
        return f"there is no style for {kind}, only for Linear and Embedding"
    if len(inspect.signature(module.forward).parameters) != 1:
        return f"{kind}.forward takes more than the one input that styles convert"
    return words[base][dim]


def _tame(search: Search, read: StyledModel, module: str, conflict: Conflict, packed: bool) -> None:
    """Give a module of a conflict the next style to try."""
    style = search.styles.get(module)
    if style is None:
        search.styles[module] = GRADIENT
        return
    where = f" ({conflict.where})" if conflict.where else ""
    search.gathered.setdefault(module, conflict.reason + where)
    search.styles[module] = GATHERED[style]
    if packed and style == "colwise" and read.is_pair(module):
        search.styles[module] = "packed_colwise"


def _unify(search: Search, model: nn.Module) -> None:
    """One style for all layers of one name: a plan names them by one pattern."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name, _ in model.named_modules():
        alike[folded(name)].append(name)
    for modules in alike.values():
        styles = {search.styles.get(module) for module in modules}
        if len(styles) == 1 or styles == {None, GRADIENT}:
            continue
        row = next((words for words in TAME if styles <= set(words)), None)
        for module in modules:
            if row is not None:
                search.styles[module] = max(styles, key=row.index)  # type: ignore[arg-type]
            elif search.styles.pop(module, None) is not None:
                search.left[f"{module}.weight"] = "the layers of this name differ"
