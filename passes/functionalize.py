"""Replace in-place ops by ops that return new values, so that a value is one thing for good."""

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from tpcompile.errors import CaptureError
from tpcompile.in_place import functional_value, new_running_stats, written_operand
from tpcompile.program import Program
from tpcompile.program_edit import arguments
from tpcompile.rewrites import Rewriter
from tpcompile.views import is_view, scatter

aten = torch.ops.aten


def functionalize(program: Program) -> Program:
    """Make every write a new value, seen by all views of what was written.

    New values of buffers and inputs become trailing outputs (`program.updates`).

    Before:  %v = select(%x, 0, 1)   %w = mul_(%v, 2)   return (%x,)
    After:   %v = select(%x, 0, 1)   %w = mul(%v, 2)   %n = select_scatter(%x, %w, 0, 1)
             return (%n,)
    """
    if any(written_operand(node) for node in program.calls()) or any(
        node.target is aten.batch_norm.default for node in program.calls()
    ):
        _Functionalizer(program).run()
    return program


class _Functionalizer:
    """The current value of everything, while the graph is walked in order."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.rewriter = Rewriter(program)
        self.parent: dict[fx.Node, fx.Node] = {}
        """View -> what it is a view of."""
        self.version: dict[fx.Node, int] = {}
        """Base -> number of writes so far."""
        self.value: dict[fx.Node, tuple[int, fx.Node]] = {}
        """Base or view -> (version, its value at that version)."""
        self.written: dict[fx.Node, fx.Node] = {}
        """In-place call -> the operand it gives back."""

    def run(self) -> None:
        for node in list(self.program.graph.nodes):
            self.rewriter.at(node).note_size(node)
            if node.op == "call_function":
                self._visit(node)
            elif node.op == "output":
                self._finish(node)
        for node in reversed(self.written):
            self.program.graph.erase_node(node)

    def _visit(self, node: fx.Node) -> None:
        operand = written_operand(node)
        target = self.written.get(operand, operand) if operand else None
        # asked before operands are replaced: the new values may have other strides
        shares = operand is None and is_view(self.program, node)
        self._read_current(node)
        if target is not None:
            self._check_gradient(node, target)
            self._write(target, functional_value(self.rewriter, node))
            self.written[node] = target
            return
        if node.target is aten.batch_norm.default:
            for buffer, new in new_running_stats(self.rewriter, node):
                self._write(self._origin(buffer), new)
        origin = self._view_of(node, shares)
        if origin is not None:
            self.parent[node] = origin
            self.value[node] = (self.version.get(self._base(node), 0), node)
            if self._base(node) in self.version and node.target is aten.view.default:
                # the new value's strides need not be the old one's
                node.target = aten.reshape.default

    def _read_current(self, node: fx.Node) -> None:
        """Let a node read the current values of its operands, and remember what they were."""
        self.origins: dict[fx.Node, fx.Node] = {}

        def current(arg: fx.Node) -> fx.Node:
            arg = self.written.get(arg, arg)
            new = self._current(arg)
            self.origins[new] = arg
            return new

        node.args, node.kwargs = map_arg((arguments(node), node.kwargs), current)

    def _origin(self, node: fx.Node) -> fx.Node:
        return self.origins.get(node, node)

    def _view_of(self, node: fx.Node, shares: bool) -> fx.Node | None:
        if node.target is operator.getitem:
            source = self._origin(arguments(node)[0])
            return source if source in self.parent else None
        return self._origin(arguments(node)[0]) if shares else None

    def _base(self, node: fx.Node) -> fx.Node:
        while node in self.parent:
            node = self.parent[node]
        return node

    def _current(self, node: fx.Node) -> fx.Node:
        """The node that holds `node`'s value after the writes so far."""
        version = self.version.get(self._base(node), 0)
        if version == 0:
            return node
        known = self.value.get(node)
        if known is not None and known[0] == version:
            return known[1]
        parent = self._current(self.parent[node])
        target = aten.reshape.default if node.target is aten.view.default else node.target
        new = self.rewriter(target, parent, *arguments(node)[1:], **node.kwargs)
        self.value[node] = (version, new)
        return new

    def _write(self, node: fx.Node, new: fx.Node) -> None:
        """Give `node`, and through it all it is a view of, a new value."""
        base = self._base(node)
        values = {node: new}
        while node is not base:
            parent = self.parent[node]
            # an item of a split is written into what was split
            whole = self.parent[parent] if node.target is operator.getitem else parent
            context = parent if whole is not parent else whole
            new = scatter(self.rewriter, node, context, self._current(whole), new)
            node = whole
            values[node] = new
        version = self.version.get(base, 0) + 1
        self.version[base] = version
        self.value.update({n: (version, v) for n, v in values.items()})

    def _check_gradient(self, node: fx.Node, target: fx.Node) -> None:
        """Refuse a write that autograd does not see to a value that needs a gradient."""
        chain = target
        hidden = False
        while chain in self.parent:
            hidden |= chain.target is aten.detach.default
            chain = self.parent[chain]
        if hidden and _needs_grad(chain, {}):
            raise CaptureError(
                "cannot capture an in-place op that autograd does not see.",
                f"{node.meta.get('where') or node.name} writes under no_grad (or through "
                "detach or .data) to a tensor that needs a gradient.",
                "compute a new tensor instead, or do it outside of forward.",
            )

    def _finish(self, output: fx.Node) -> None:
        self._read_current(output)
        assigned = self.program.updates
        changed = [
            node
            for node in self.program.placeholders()
            if node in self.version and node.name not in assigned
        ]
        news = []
        for node in changed:
            new = self._current(node)
            if _needs_grad(new, {}):
                new = self.rewriter(aten.detach.default, new)
            news.append(new)
        output.args = ((*arguments(output)[0], *news),)
        self.program.updates = (*assigned, *(node.name for node in changed))


def _needs_grad(node: fx.Node, known: dict[fx.Node, bool]) -> bool:
    """Whether a gradient may flow into a value."""
    stack = [node]
    seen: set[fx.Node] = set()
    while stack:
        each = stack.pop()
        val: Any = each.meta.get("val")
        if each in seen or each.target is aten.detach.default:
            continue
        seen.add(each)
        if isinstance(val, Tensor) and not (val.is_floating_point() or val.is_complex()):
            continue
        if each.op == "placeholder" and isinstance(val, Tensor) and val.requires_grad:
            return True
        stack += each.all_input_nodes
    return False
