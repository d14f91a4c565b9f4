"""How the parts of one program are written: values, dims, placements, arguments, paths."""

import operator
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import groupby
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx

from tpcompile.dim_names import shared_prefix
from tpcompile.dims import Dim, contains, text_of
from tpcompile.formulas import Symbols
from tpcompile.layout import share
from tpcompile.placement import R, State
from tpcompile.program import Program, values

_SHORT = {"batch": "b", "seq": "s"}
_DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "complex": "c", "bool": "b8", "uint": "u"}
_TO_THE_END = 2**63 - 1
_DROPPED = ("pin_memory", "layout")
"""Keyword arguments that say nothing of the value."""


class Labels:
    """Writes the nodes of one program, all names in full or relative to one block."""

    def __init__(self, program: Program, within: str = "") -> None:
        self.program, self.within = program, within
        self.paths: set[str] = program.extra.get("block_paths", set())
        self.prefix = shared_prefix(self.paths)
        self.axis: tuple[str, int, int] | None = program.extra.get("axis")
        self.localized = "layouts" in program.extra
        self.names: dict[fx.Node, str] = {}
        """Leaves of a block's own graph -> what they are."""
        self._symbols = symbol_names(program)
        self._sizes: dict[Any, str] = {}

    @cached_property
    def symbols(self) -> Symbols:
        """The dims of a named program as sympy symbols."""
        return Symbols(self.program.extra["sizes"], self.program.extra["cost"].size)

    def block(self, node: fx.Node) -> str:
        """Path of the repeated block a node belongs to, or ""."""
        if "block" in node.meta:
            return node.meta["block"]
        if node.op != "placeholder":
            return next((m for m in node.meta.get("modules", ()) if m in self.paths), "")
        leaf = self.program.leaves.get(node.name)
        parts = leaf.name.split(".") if leaf is not None else []
        heads = (".".join(parts[:i]) for i in range(len(parts)))
        return next((head for head in heads if head in self.paths), "")

    def value(self, node: fx.Node) -> str:
        """`%linear_3`, or the name of a parameter, buffer or input."""
        if node in self.names:
            return self.names[node]
        leaf = self.program.leaves.get(node.name) if node.op == "placeholder" else None
        if leaf is None:
            return f"%{node.name}"
        return f"%{node.name}" if leaf.kind == "constant" else self.path(leaf.name)

    def path(self, path: str) -> str:
        """A module path or parameter name, relative to the block where it is inside of it."""
        if self.within and (path == self.within or path.startswith(f"{self.within}.")):
            return path[len(self.within) + 1 :]
        return path

    def dims(self, node: fx.Node, index: int) -> list[str]:
        """Names of the dims of one output; local where the program is."""
        val, dims = values(node)[index], node.meta.get("dims")
        if not dims:
            return [self.size(size) for size in val.shape]
        state = self.states(node)[index] if self.localized else None
        name = self._namer(node, state if isinstance(state, Dim) else None)
        return [
            name(dim, size) if dim is not None else "1"
            for dim, size in zip(dims[index], val.shape, strict=True)
        ]

    def _namer(self, node: fx.Node, atom: Dim | None) -> Callable[[Dim, Any], str]:
        scope = self._scope(node)

        def name(dim: Dim, size: Any) -> str:
            def named(each: Dim) -> str:
                text = _SHORT.get(each.name, each.name.removeprefix(scope)) or self._code(each)
                return text + self._share(atom) if atom and contains(each, atom) else text

            root = dim.root()
            # A size that no named dim explains is best written as the expression it is.
            return self.size(size) if root.is_leaf() and not root.name else text_of(dim, named)

        return name

    def _scope(self, node: fx.Node) -> str:
        block = self.block(node) or self.within
        return f"{block.removeprefix(self.prefix)}." if block else "\0"

    def _code(self, dim: Dim) -> str:
        sizes = self.program.extra.get("sizes")
        return self.size(sizes.expr(dim.size) if sizes else dim.size)

    def _share(self, atom: Dim) -> str:
        assert self.axis is not None
        _, size, rank = self.axis
        units = self.program.extra["sizes"].expr(atom.size)
        if not isinstance(units, int) or units % size == 0:
            return f"/{size}"
        return f"[{share(units, size, rank)} of {units}]"

    def size(self, size: Any) -> str:
        """A size with its symbols by name: `b*s`."""
        expr = size.node.expr if isinstance(size, torch.SymInt) else size
        if isinstance(expr, int):
            return str(expr)
        if expr not in self._sizes:
            self._sizes[expr] = str(expr.subs(self._symbols)).replace(" ", "")
        return self._sizes[expr]

    def type(self, node: fx.Node) -> str:
        """`bf16[b, s, hidden]`, several for an op with several outputs, `int` for a size."""
        shown = [
            f"{dtype_text(val.dtype)}[{', '.join(self.dims(node, i))}]"
            for i, val in enumerate(values(node))
        ]
        runs = [(text, len(list(run))) for text, run in groupby(shown)]
        return ", ".join(f"{n} x {text}" if n > 1 else text for text, n in runs) or "int"

    def states(self, node: fx.Node) -> list[State]:
        """Placement of each output; empty before there is a plan."""
        n = len(values(node))
        if "conversion" in node.meta:
            return [node.meta["conversion"].need]
        if "bucket" in node.meta:
            return [each.need for each in node.meta["bucket"]]
        if "states" in node.meta:
            return list(node.meta["states"])[:n]
        plan = self.program.extra.get("assignment")
        if plan is None:
            return []
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            whole = self.states(node.args[0])
            index = node.args[1]
            return [whole[index]] if isinstance(index, int) and index < len(whole) else [R] * n
        if node in plan.strategies:
            return list(plan.strategies[node].outs)
        return [plan.parameters.get(node, R)] * n

    def state(self, state: State, node: fx.Node) -> str:
        """`R`, `R*`, `P` or `S(ffn)`."""
        if not isinstance(state, Dim):
            return state
        scope = self._scope(node)
        return f"S({text_of(state, lambda d: self._short(d, scope))})"

    def _short(self, dim: Dim, scope: str) -> str:
        return _SHORT.get(dim.name, dim.name.removeprefix(scope)) or self._code(dim)

    def placement(self, node: fx.Node) -> str:
        """Placements of all outputs; one where all are the same."""
        texts = [self.state(state, node) for state in self.states(node)]
        return " ".join(texts if len(set(texts)) > 1 else texts[:1])

    def op(self, node: fx.Node) -> str:
        """Name of what a call calls, without `aten.` and `.default`."""
        target = node.target
        packet = hasattr(target, "overloadpacket")
        name = str(target) if packet else getattr(target, "__name__", "")
        return name.removeprefix("aten.").removesuffix(".default")

    def args(self, node: fx.Node) -> str:
        """Arguments as text."""
        if "conversion" in node.meta or "bucket" in node.meta:
            return ", ".join(self._conversion_args(node.args))
        if self.op(node) == "call_block":
            return self._block_args(node)
        shown = [self.arg(arg) for arg in node.args]
        kept = [(k, v) for k, v in node.kwargs.items() if k not in _DROPPED or v]
        return ", ".join([*shown, *(f"{k}={self.arg(v)}" for k, v in kept)])

    def _block_args(self, node: fx.Node) -> str:
        """Path of the block, then its inputs; emission adds the model and a number."""
        args = list(node.args)
        if isinstance(args[0], fx.Node):
            _, path, _, *args = args
            args = [".".join(path), *args]  # type: ignore[arg-type]
        return ", ".join(map(self.arg, args))

    def _conversion_args(self, args: Iterable[Any]) -> list[str]:
        """Source, axis, and which dim; how it is dealt out where that is not in equal chunks."""
        found = []
        for arg in args:
            if isinstance(arg, int):
                found.append(f"dim={arg}")
            elif _is_segments(arg):
                if len(arg) > 1 or any((outer, inner) != (1, 1) for outer, _, inner in arg):
                    found.append(f"by={self._segments(arg)}")
            else:
                found.append(self.arg(arg))
        return found

    def _segments(self, segments: tuple[Any, ...]) -> str:
        """`[32]*128+2*[8]*128`: what stands in brackets is dealt out."""
        terms = []
        for outer, units, inner in segments:
            parts = [self.arg(outer), f"[{self.arg(units)}]", self.arg(inner)]
            terms.append("*".join(part for part in parts if part != "1"))
        return "+".join(terms)

    def arg(self, arg: Any) -> str:
        """One argument as text."""
        if isinstance(arg, fx.Node):
            val = arg.meta.get("val")
            return self.size(val) if isinstance(val, torch.SymInt) else self.value(arg)
        if arg == self.axis and arg is not None:
            return "tp"
        if _is_segments(arg):
            return self._segments(arg)
        if isinstance(arg, (list, tuple)):
            inner = ", ".join(map(self.arg, arg))
            return f"[{inner}]" if isinstance(arg, list) else f"({inner})"
        if isinstance(arg, torch.dtype):
            return dtype_text(arg)
        if isinstance(arg, torch.device):
            return arg.type  # its index differs between ranks
        if isinstance(arg, int) and arg == _TO_THE_END:
            return "end"
        return arg if isinstance(arg, str) else repr(arg)


def dtype_text(dtype: torch.dtype) -> str:
    """Short form of a dtype.

    >>> dtype_text(torch.bfloat16)
    'bf16'
    """
    name = str(dtype).removeprefix("torch.")
    stem = name.rstrip("0123456789")
    return _DTYPES.get(stem, stem) + name[len(stem) :]


def _is_segments(arg: Any) -> TypeGuard[tuple[tuple[Any, Any, Any], ...]]:
    return (
        isinstance(arg, tuple)
        and bool(arg)
        and all(isinstance(each, tuple) and len(each) == 3 for each in arg)
        and all(isinstance(part, (int, fx.Node)) for each in arg for part in each)
    )


def symbol_names(program: Program) -> dict[Any, Any]:
    """Symbol -> a symbol called b or s, by the dim of the input that it sizes."""
    import sympy

    nodes = {node.name: node for node in program.placeholders("input")}
    found: dict[Any, str] = {}
    for symbol, (name, place) in program.symbols.items():
        dims = nodes[name].meta.get("dims") if name in nodes else None
        if dims and dims[0][place] is not None:
            text = text_of(dims[0][place])
            found[symbol] = _SHORT.get(text, text)
        else:
            found[symbol] = "bs"[place] if place < 2 else f"{program.leaves[name].name}.{place}"
    return {symbol: sympy.Symbol(text, integer=True) for symbol, text in found.items()}


def mark_states(program: Program) -> None:
    """Keep what is decided in the nodes, where their copies in other graphs have it too.

    `meta["states"]` are the placements of the outputs; `meta["weighed"]` says that the value
    depends on a parameter, so that a placement was chosen at all.
    """
    labels = Labels(program)
    weighed = program.extra["facts"].from_parameters
    for node in program.graph.nodes:
        if node.op != "output" and isinstance(node.meta.get("val"), (Tensor, tuple, list)):
            node.meta["states"] = labels.states(node)
            node.meta["weighed"] = node in weighed or "conversion" in node.meta
