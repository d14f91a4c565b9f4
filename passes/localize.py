"""Turn the global program into the program one rank runs on its pieces."""

import operator
from math import prod
from typing import Any

import torch
from torch import fx
from tpcompile.passes.insert_collectives import Conversion

from tpcompile.cache_plan import cached_inputs
from tpcompile.caches import HEADS
from tpcompile.dims import Dim, contains, segments_of
from tpcompile.layout import is_even, share, start
from tpcompile.placement import State
from tpcompile.problem import Assignment
from tpcompile.program import Program, operands
from tpcompile.readers import user_outputs
from tpcompile.rule import DimSpec, Rule, Spec
from tpcompile.sizes import Sizes
from tpcompile.storage import ParamLayout
from tpcompile.strategies import Strategy


def localize(program: Program) -> Program:
    """Cut literal sizes to this rank's share and give every collective its axis and layout.

    Before:  %v = view(%q, [2, 8, 32, 64])     %r = reduce_scatter(%y)
    After:   %v = view(%q, [2, 8, -1, 64])     %r = reduce_scatter(%y, (tp, 2, 0), 1, ((1, 8, 1),))

    `program.extra["axis"]` is (group name, size, rank); sets `program.extra["layouts"]`.
    """
    context = _Context(program)
    plan: Assignment = program.extra["assignment"]
    for node in list(program.calls()):
        if "conversion" in node.meta:
            _localize_conversion(node, context)
        elif (strategy := plan.strategies.get(node)) is not None and strategy.split is not None:
            _localize_call(node, strategy, context)
    program.extra["layouts"] = {
        program.leaves[node.name].name: layout_for(node, state, context.sizes, context.axis[1])
        for node, state in plan.parameters.items()
        if program.is_parameter(node)
    }
    program.extra["split_outputs"] = _split_outputs(program, context)
    program.extra["input_shapes"] = _local_inputs(program, context)
    program.extra["dynamic"] = context.dynamic
    return program


def layout_for(node: fx.Node, state: State, sizes: Sizes, degree: int) -> ParamLayout:
    """How a parameter in `state` is stored."""
    shape = tuple(map(int, node.meta["val"].shape))
    if not isinstance(state, Dim):
        return ParamLayout(shape, None, (), degree)
    dim, segments = _split_dim(node.meta["dims"][0], state)
    return ParamLayout(shape, dim, segments, degree)


def _split_dim(dims: tuple[Any, ...], atom: Dim) -> tuple[int, tuple[tuple[int, int, int], ...]]:
    place = next(i for i, d in enumerate(dims) if d is not None and contains(d, atom))
    return place, segments_of(dims[place], atom)


_SIZE_OPS = {
    "Add": operator.add,
    "Mul": operator.mul,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Max": max,
    "Min": min,
}
"""sympy function of a size expression -> the Python function that computes it."""


class _Context:
    """What localising any node of one program needs."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.axis: tuple[str, int, int] = program.extra["axis"]
        self.sizes: Sizes = program.extra["sizes"]
        self.dynamic: set[Any] = set()
        """Expressions that must be divisible by the degree at run time."""
        self._nodes: dict[Any, Any] = {}

    def size(self, code: int) -> Any:
        """A coded size as an int or a node."""
        return self.materialize(self.sizes.expr(code))

    def materialize(self, expr: Any) -> Any:
        """An int or sympy expression of input sizes as an int or a node at the graph's top."""
        if isinstance(expr, int) or expr.is_Integer:
            return int(expr)
        if expr not in self._nodes:
            self._nodes[expr] = self._build(expr)
        return self._nodes[expr]

    def _build(self, expr: Any) -> fx.Node:
        if expr.is_Symbol:
            if expr not in self.program.symbols:
                return self._computed(expr)
            name, dim = self.program.symbols[expr]
            leaf = next(n for n in self.program.placeholders("input") if n.name == name)
            return self._call(torch.ops.aten.sym_size.int, (leaf, dim), leaf.meta["val"].shape[dim])
        fn = _SIZE_OPS.get(expr.func.__name__)
        if fn is None:
            return self._computed(expr)
        parts = [self.materialize(arg) for arg in expr.args]
        total = parts[0]
        for part in parts[1:]:
            total = self._call(fn, (total, part), None)
        return total

    def _computed(self, expr: Any) -> fx.Node:
        """The node of the capture that computes a size no input gives."""
        return next(
            n
            for n in self.program.calls()
            if isinstance(val := n.meta.get("val"), torch.SymInt) and val.node.expr == expr
        )

    def _call(self, target: Any, args: tuple[Any, ...], val: Any) -> fx.Node:
        placeholders = list(self.program.placeholders())
        after = [a for a in args if isinstance(a, fx.Node) and a.op != "placeholder"]
        place = max(after, default=placeholders[-1])
        with self.program.graph.inserting_after(place):
            node = self.program.graph.call_function(target, args)
        node.meta.update(val=val, path="", where="", modules=(), calls=())
        return node

    def must_divide(self, atom: Dim) -> None:
        """Note that a named dim is split; one that is no int must divide when the graph runs."""
        if self.sizes.expr(atom.size) != atom.size:
            self.dynamic.add(self.sizes.expr(atom.size))

    def segments(self, dim: Dim, atom: Dim) -> tuple[tuple[Any, Any, Any], ...]:
        """How a dim is dealt out, sizes as ints or nodes."""
        self.must_divide(atom)
        return tuple(
            (self.size(o), self.size(u), self.size(i)) for o, u, i in segments_of(dim, atom)
        )

    def shared(self, code: int) -> Any:
        """This rank's share of a coded number of units."""
        _, size, rank = self.axis
        units = self.size(code)
        if isinstance(units, int):
            return share(units, size, rank)
        self.dynamic.add(self.sizes.expr(code))
        key = ("share", code)
        if key not in self._nodes:
            self._nodes[key] = self._call(operator.floordiv, (units, size), None)
        return self._nodes[key]


class _NodeSplit:
    """`rule.Split` for one call of which `atom` is split."""

    def __init__(self, node: fx.Node, rule: Rule, atom: Dim, context: _Context) -> None:
        self.node, self.rule, self.atom, self.context = node, rule, atom, context
        self.axis = context.axis
        self._bound: dict[str, Dim] = node.meta["bound"]

    def is_split(self, factor: str) -> bool:
        return factor in self._bound and contains(self._bound[factor], self.atom)

    def global_size(self, factor: str) -> Any:
        return self.context.size(self._bound[factor].size) if factor in self._bound else 1

    def local_size(self, factor: str) -> Any:
        if not self.is_split(factor):
            return self.global_size(factor)
        total: Any = 0
        for outer, units, inner in segments_of(self._bound[factor], self.atom):
            parts = [self.context.size(outer), self.context.shared(units), self.context.size(inner)]
            total = _plus(total, _times(parts, self.context), self.context)
        return total

    def offset(self, factor: str) -> Any:
        ((_, units, inner),) = segments_of(self._bound[factor], self.atom)
        _, size, rank = self.axis
        total = self.context.size(units)
        if isinstance(total, int):
            return _times([start(total, size, rank), self.context.size(inner)], self.context)
        return _times([self.context.shared(units), rank, self.context.size(inner)], self.context)

    def length(self, spec: DimSpec) -> Any:
        total: Any = 0
        for term in spec:
            product = _times([self.local_size(name) for name in term], self.context)
            total = _plus(total, product, self.context)
        return total

    def layout(self, spec: Spec) -> tuple[int, tuple[tuple[Any, Any, Any], ...]] | None:
        for i, dim in enumerate(spec):
            if any(self.is_split(name) for term in dim for name in term):
                parts = [self._term_segments(term) for term in dim]
                return i, tuple(s for part in parts for s in part)
        return None

    def _term_segments(self, term: tuple[str, ...]) -> tuple[tuple[Any, Any, Any], ...]:
        place = next(i for i, name in enumerate(term) if self.is_split(name))
        before = prod(self._bound[n].size for n in term[:place] if n in self._bound)
        after = prod(self._bound[n].size for n in term[place + 1 :] if n in self._bound)
        size = self.context.size
        found = segments_of(self._bound[term[place]], self.atom)
        assert len(found) == 1 or before == 1
        return tuple((size(before * o), size(u), size(i * after)) for o, u, i in found)


def _times(parts: list[Any], context: _Context) -> Any:
    ints = prod(p for p in parts if isinstance(p, int))
    nodes = [p for p in parts if not isinstance(p, int)]
    if not nodes or ints == 0:
        return ints
    total = nodes[0] if ints == 1 else context._call(operator.mul, (nodes[0], ints), None)
    for node in nodes[1:]:
        total = context._call(operator.mul, (total, node), None)
    return total


def _plus(a: Any, b: Any, context: _Context) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    if a == 0:
        return b
    return a if b == 0 else context._call(operator.add, (a, b), None)


def _local_inputs(program: Program, context: _Context) -> dict[str, tuple[Any, ...]]:
    """Shapes of the inputs on this rank: the tensors of caches are parts."""
    shapes: dict[str, tuple[Any, ...]] = dict(program.extra.get("input_shapes", {}))
    _, size, rank = context.axis
    for node, path in cached_inputs(program).items():
        entry = program.extra["cache_entries"][path]
        if entry is not None:
            whole = shapes[node.name]
            local = entry.local_size(size, rank)
            shapes[node.name] = (*whole[:HEADS], local, *whole[HEADS + 1 :])
    return shapes


def _split_outputs(program: Program, context: _Context) -> dict[int, int]:
    """Number of a returned tensor -> dim, for those that leave as DTensors in chunks of it."""
    found = {}
    if program.extra.get("outputs") != "sharded":
        return found
    cached = program.extra["assignment"].problem.caches.outputs
    for i, node in enumerate(user_outputs(program)):
        if i in cached:
            continue
        (state,) = node.meta.get("states", (None,))  # none where no plan was made
        if isinstance(state, Dim):
            found[i], _ = _split_dim(node.meta["dims"][0], state)
            context.must_divide(state)
    return found


def _localize_call(node: fx.Node, strategy: Strategy, context: _Context) -> None:
    rule: Rule = node.meta["rule"]
    if rule.local is None or strategy.split is None:
        return
    split = _NodeSplit(node, rule, strategy.split, context)
    target, args, kwargs = rule.local(split, *node.args, **node.kwargs)
    node.target, node.args, node.kwargs = target, tuple(args), kwargs


def _localize_conversion(node: fx.Node, context: _Context) -> None:
    what: Conversion = node.meta["conversion"]
    (source,) = operands(node)
    layouts = []
    for state in (what.have, what.need):
        if isinstance(state, Dim):
            dims = node.meta["dims"][0]
            place, _ = _split_dim(dims, state)
            layouts += [place, context.segments(dims[place], state)]
    flag: dict[str, Any] = {"partial_grad": True} if what.step.partial_grad else {}
    if what.step.function in ("all_gather", "split", "to_partial") and not flag:
        flag = {"partial_grad": False}
    node.args, node.kwargs = (source, context.axis, *layouts), flag


__all__ = ["is_even", "layout_for", "localize"]
