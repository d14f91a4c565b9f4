"""Give every tensor dim a named dim, by unifying the factors of all rules over the graph."""

import operator
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

import tpcompile.ops  # noqa: F401  registers the rules
from tpcompile.cost import hint
from tpcompile.dims import Dim, MaybeDim, composite, decompose, keep_apart, merge
from tpcompile.errors import RuleError
from tpcompile.program import Program, operands, values
from tpcompile.rule import DimSpec, Rule, Spec, Term, rule_for
from tpcompile.sizes import Sizes

Dims = tuple[MaybeDim, ...]


class Shape:
    """What a rule function sees of a tensor: coded sizes, rank and dtype."""

    __slots__ = ("dtype", "ndim", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.ndim, self.dtype = shape, len(shape), dtype


_SOME_NUMBER = 0.5
"""In place of a number that only the data know: no rule may depend on which it is."""


def name_dims(program: Program) -> Program:
    """Set `node.meta["dims"]` (one tuple of dims per output) and `node.meta["rule"]`.

    Before:  %y = linear(%x, %w)
    After:   %y = linear(%x, %w)   rule *b k, n k -> *b n;  dims (batch, seq, ffn)

    A dim on which a rule and what is known of its operands disagree becomes whole at that op.
    """
    naming = _Naming(Sizes(_hints(program)))
    for node in program.graph.nodes:
        if node.op == "placeholder":
            dims = naming.fresh_dims(node.meta["val"])
            node.meta["dims"] = [dims]
            if program.is_parameter(node):
                keep_apart([dim for dim in dims if dim is not None])
        elif node.op == "call_function":
            naming.visit(node)
    program.extra["sizes"] = naming.sizes
    return program


def _hints(program: Program) -> dict[Any, int]:
    vals = {node.name: node.meta["val"] for node in program.placeholders("input")}
    return {s: hint(vals[name].shape[dim]) for s, (name, dim) in program.symbols.items()}


class _Naming:
    """The state of one naming run."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self._rules: dict[Any, Rule | None] = {}
        self._shapes: dict[fx.Node, list[Shape]] = {}

    def fresh_dims(self, val: Tensor) -> Dims:
        codes = map(self.sizes.code, val.shape)
        return tuple(None if code == 1 else Dim(code) for code in codes)

    def visit(self, node: fx.Node) -> None:
        outs = values(node)
        if node.target is operator.getitem:
            source, index = node.args
            if not isinstance(source, fx.Node) or not isinstance(index, int) or not outs:
                return
            node.meta["dims"] = [source.meta["dims"][index]]
            return
        node.meta["rule"], node.meta["bound"], node.meta["conflicts"] = None, {}, ()
        if not outs:
            return
        rule = self._rule(node)
        if rule is not None and len(rule.ins) != len(operands(node)):
            raise _wrong(node, f"{rule} is for {len(rule.ins)} tensors, not {len(operands(node))}")
        node.meta["rule"] = rule
        if rule is None:
            node.meta["dims"] = [self.fresh_dims(val) for val in outs]
        else:
            self._unify(node, rule, outs)

    def shapes(self, node: fx.Node) -> list[Shape]:
        if node not in self._shapes:
            self._shapes[node] = [
                Shape(tuple(map(self.sizes.code, v.shape)), v.dtype) for v in values(node)
            ]
        return self._shapes[node]

    def _rule(self, node: fx.Node) -> Rule | None:
        args = [self._stand_in(arg) for arg in node.args]
        kwargs = {name: self._stand_in(arg) for name, arg in node.kwargs.items()}
        key = (node.target, _key(args), _key(list(kwargs.items())))
        if key not in self._rules:
            try:
                self._rules[key] = rule_for(node.target, args, kwargs)
            except Exception as error:  # rules are users' functions, too
                raise _wrong(node, f"{type(error).__name__}: {error}") from error
        return self._rules[key]

    def _stand_in(self, arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            val = arg.meta.get("val")
            if isinstance(val, Tensor):
                return self.shapes(arg)[0]
            if isinstance(val, (torch.SymFloat, torch.SymBool)):
                return _SOME_NUMBER
            return self.sizes.code(val) if isinstance(val, (int, torch.SymInt)) else val
        if isinstance(arg, (list, tuple)):
            return [self._stand_in(item) for item in arg]
        return arg

    def _unify(self, node: fx.Node, rule: Rule, outs: list[Tensor]) -> None:
        dims = [n.meta["dims"][0] for n in operands(node)]
        sources = list(zip(rule.ins, dims, strict=True))
        out_shapes = [s.shape for s in self.shapes(node)]
        sizes = _factor_sizes(rule, [s for _, s in _sized_ins(self, node, rule)], out_shapes)
        binding = _Binding(sizes)
        for spec, dims in sources:
            for dim_spec, dim in zip(spec, dims, strict=True):
                if dim is not None:
                    binding.enter(dim_spec, dim)
        node.meta["dims"] = [
            tuple(binding.leave(dim_spec, size) for dim_spec, size in zip(spec, shape, strict=True))
            for spec, shape in zip(rule.outs, out_shapes, strict=True)
        ]
        node.meta["conflicts"] = tuple(binding.conflicts)
        node.meta["bound"] = binding.bound
        assert len(node.meta["dims"]) == len(outs), f"{node.target}: {rule}"


def _wrong(node: fx.Node, found: str) -> RuleError:
    asked = f"use the rule of {node.target} in {node.meta.get('path') or 'the root'}"
    return RuleError(asked, found, "correct it; tpcompile.check_rule(op) proves a rule")


def _sized_ins(naming: _Naming, node: fx.Node, rule: Rule) -> list[tuple[Spec, tuple[int, ...]]]:
    return [
        (spec, naming.shapes(n)[0].shape) for spec, n in zip(rule.ins, operands(node), strict=True)
    ]


class _Binding:
    """Which dim each factor of one call is."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self.bound: dict[str, Dim] = {}
        self.conflicts: list[Dim] = []
        """Dims that should be one and are not: none of their leaves may be split here."""

    def enter(self, spec: DimSpec, dim: Dim) -> None:
        """Bind the factors of one operand dim to (parts of) `dim`."""
        if len(spec) == 1 and len(spec[0]) == 1:
            name = spec[0][0]
            known = self.bound.setdefault(name, dim)
            if known is not dim and not merge(known, dim):
                self.conflicts += [known, dim]
            return
        terms = [t for t in (self._term(term) for term in spec) if t is not None]
        if len(spec) == 1:
            parts = [self._factor(name) for name in spec[0]]
            fits = decompose(dim, [p for p in parts if p is not None], product=True)
        else:
            fits = decompose(dim, terms, product=False)
        if not fits:
            self.conflicts += [dim, *terms]

    def leave(self, spec: DimSpec, size: int) -> MaybeDim:
        """The dim of an output, whose coded size is `size`."""
        terms = [t for t in (self._term(term) for term in spec) if t is not None]
        dim = composite(terms, product=False)
        if (1 if dim is None else dim.size) == size:
            return dim
        # The rule compared sizes, and codes have no order: 32 rows cut to a length of a symbol.
        self.conflicts += terms
        return None if size == 1 else Dim(size)

    def _term(self, term: Term) -> MaybeDim:
        return composite(
            [f for f in (self._factor(name) for name in term) if f is not None], product=True
        )

    def _factor(self, name: str) -> MaybeDim:
        if self.sizes.get(name) == 1:
            return None
        if name not in self.bound:
            self.bound[name] = Dim(self.sizes[name])
        return self.bound[name]


def _factor_sizes(
    rule: Rule, ins: list[tuple[int, ...]], outs: list[tuple[int, ...]]
) -> dict[str, int]:
    """Sizes of all factors, from the dims they fill alone, then from products and sums."""
    sizes = dict(rule.sizes)
    composed: list[tuple[DimSpec, int]] = []
    for spec, shape in zip((*rule.ins, *rule.outs), (*ins, *outs), strict=True):
        for dim, size in zip(spec, shape, strict=True):
            if len(dim) == 1 and len(dim[0]) == 1:
                sizes[dim[0][0]] = size
            elif any(dim) or len(dim) > 1:
                composed.append((dim, size))
    for _ in range(2):
        for dim, size in composed:
            _solve_size(dim, size, sizes)
    return sizes


def _solve_size(dim: DimSpec, size: int, sizes: dict[str, int]) -> None:
    """Fill in the one unknown factor of a composed dim, if just one is unknown."""
    unknown = [name for term in dim for name in term if name not in sizes]
    if len(unknown) != 1:
        return
    known = sum(prod(sizes[n] for n in term) for term in dim if unknown[0] not in term)
    beside = prod(sizes[n] for term in dim if unknown[0] in term for n in term if n != unknown[0])
    sizes[unknown[0]] = (size - known) // beside


def _key(arg: Any) -> Any:
    if isinstance(arg, Shape):
        return ("tensor", arg.shape, arg.dtype)
    if isinstance(arg, (list, tuple)):
        return tuple(_key(item) for item in arg)
    return (type(arg), arg)
