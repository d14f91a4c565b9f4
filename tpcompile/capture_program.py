"""From torch.export's result to a Program: names, locations, symbols and guards."""

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx, nn

from .capture_output import OutputSpec
from .capture_watch import is_user_file
from .program import Leaf, LeafKind, Program
from .program_edit import arguments
from .structure import flatten
from .torch_private import FakeTensor, pytree, shape_guards, sym_expr

KINDS: dict[str, LeafKind] = {
    "PARAMETER": "parameter",
    "BUFFER": "buffer",
    "CONSTANT_TENSOR": "constant",
    "USER_INPUT": "input",
}
PREFIX = "model"
"""Name of the user's model in the module that is exported."""


def program_from_export(
    exported: torch.export.ExportedProgram,
    model: nn.Module,
    names: list[str],
    out_spec: OutputSpec | None,
    assigned: list[str],
) -> Program:
    """The program of an exported wrapper around `model`, whose inputs are called `names`.

    Without `out_spec` the output's structure is export's.  The wrapper's last outputs are the
    new values of the `assigned` buffers.
    """
    graph = exported.graph_module.graph
    program = Program(graph, _leaves(exported, names))
    _merge_aliases(program, model)
    _set_outputs(program, exported, out_spec)
    _set_updates(program, assigned)
    _set_symbols(program)
    # Regions (no_grad, autocast) are submodules until they are inlined.
    program.extra["regions"] = dict(exported.graph_module.named_children())
    for module in exported.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            set_locations(module.graph)
    return program


def _leaves(exported: torch.export.ExportedProgram, names: list[str]) -> dict[str, Leaf]:
    leaves: dict[str, Leaf] = {}
    inputs = iter(names)
    for spec in exported.graph_signature.input_specs:
        kind = KINDS[spec.kind.name]
        name = spec.arg.name
        if kind == "input":
            leaves[name] = Leaf(kind, next(inputs))
        elif kind == "constant":
            value: Any = exported.constants[str(spec.target)]
            if isinstance(value, FakeTensor):
                raise ValueError(f"tracing lost sight of a tensor {list(value.shape)} it made")
            leaves[name] = Leaf(kind, name, value)
        else:
            leaves[name] = Leaf(kind, str(spec.target).removeprefix(f"{PREFIX}."))
    return leaves


def _merge_aliases(program: Program, model: nn.Module) -> None:
    """One placeholder per tied parameter or buffer: export makes one per name."""
    groups: dict[int, list[str]] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        groups.setdefault(id(tensor), []).append(name)
    first = {name: group[0] for group in groups.values() for name in group}
    program.aliases = {group[0]: tuple(group) for group in groups.values() if len(group) > 1}
    kept: dict[str, fx.Node] = {}
    for node in list(program.placeholders()):
        leaf = program.leaves[node.name]
        if leaf.kind not in ("parameter", "buffer"):
            continue
        name = first.get(leaf.name, leaf.name)
        if name in kept:
            node.replace_all_uses_with(kept[name])
            program.graph.erase_node(node)
            del program.leaves[node.name]
        else:
            kept[name] = node
            program.leaves[node.name] = Leaf(leaf.kind, name)


def _set_outputs(
    program: Program, exported: torch.export.ExportedProgram, out_spec: OutputSpec | None
) -> None:
    output = program.output()
    flat = list(arguments(output)[0])
    if out_spec is None:
        signature = exported.module_call_graph[0].signature
        assert signature is not None
        spec = signature.out_spec
        flat, structure, _ = flatten(
            pytree.tree_unflatten(flat, spec), lambda value: isinstance(value, fx.Node)
        )
        out_spec = OutputSpec(structure)
    output.args = (tuple(flat),)
    program.out_spec, program.n_outputs = out_spec, len(flat)


def _set_updates(program: Program, assigned: list[str]) -> None:
    names = {program.leaves[node.name].name: node.name for node in program.placeholders("buffer")}
    canonical = {alias: first for first, group in program.aliases.items() for alias in group}
    program.updates = tuple(names[canonical.get(name, name)] for name in assigned)
    program.n_outputs -= len(assigned)


def _set_symbols(program: Program) -> None:
    shapes: dict[str, tuple[Any, ...]] = {}
    for node in program.placeholders("input"):
        sizes = tuple(
            sym_expr(size) if isinstance(size, torch.SymInt) else size
            for size in node.meta["val"].shape
        )
        shapes[node.name] = tuple(int(s) if getattr(s, "is_Integer", False) else s for s in sizes)
        for dim, size in enumerate(sizes):
            if isinstance(size, sympy.Symbol):
                program.symbols.setdefault(size, (node.name, dim))
    program.extra["input_shapes"] = shapes
    modes = (getattr(node.meta["val"], "fake_mode", None) for node in program.placeholders())
    program.extra["fake_mode"] = mode = next(filter(None, modes), None)
    known = set(program.symbols)
    loose = {s for sizes in shapes.values() for e in sizes for s in _symbols(e)} - known
    if loose:
        raise ValueError(f"input sizes {loose} are no dim of an input by themselves")
    guards = [] if mode is None else shape_guards(mode)
    program.guards = [g for g in guards if g != True and _symbols(g) <= known]  # noqa: E712 (sympy)


def _symbols(expr: Any) -> set[Any]:
    return getattr(expr, "free_symbols", set())


def set_locations(graph: fx.Graph) -> None:
    """Reduce each node's meta to `val`, `path`, `where`, `modules` and `calls`."""
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        modules, calls = [], []
        for key, (path, _) in stack.items():
            if path == PREFIX or path.startswith(f"{PREFIX}."):
                modules.append(path[len(PREFIX) + 1 :].split("@")[0])
                calls.append(int(key.rpartition("@")[2]) if "@" in key else 0)
        meta = {
            "path": modules[-1] if modules else "",
            "where": where_of(node.meta.get("stack_trace") or ""),
            "modules": tuple(modules),
            "calls": tuple(calls),
        }
        if "val" in node.meta:
            meta["val"] = node.meta["val"]
        node.meta = meta


@lru_cache(maxsize=4096)
def where_of(stack_trace: str) -> str:
    """`file.py:12`, the innermost line of the user's model in a stack trace, or ""."""
    frames = re.findall(r'File "(.+?)", line (\d+)', stack_trace)
    user = [(file, line) for file, line in frames if is_user_file(file)]
    return f"{Path(user[-1][0]).name}:{user[-1][1]}" if user else ""
