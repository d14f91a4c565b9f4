"""The one intermediate form: a torch.fx graph of ATen training ops plus what its ends mean."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx

LeafKind = Literal["parameter", "buffer", "constant", "input"]


@dataclass(frozen=True)
class Leaf:
    """What a placeholder of the graph stands for."""

    kind: LeafKind
    name: str
    """Parameter or buffer: its first name in `model.named_parameters(remove_duplicate=False)`.
    Input: a readable path such as `input_ids` or `batch.text.ids`. Constant: the graph's name."""
    tensor: Tensor | None = None
    """The value of a constant; None otherwise."""


@dataclass
class Program:
    """A captured model, at any stage between capture and emission.

    Graph conventions: placeholders are parameters, buffers, constants, then inputs (each one
    tensor); every other node is a call_function. `node.meta` holds

      val     FakeTensor(s) with global shapes (SymInt dims where dynamic), or a SymInt/int
      path    dotted path of the module that made the node, "" for the root
      where   "file.py:12" of the user's model, or ""

    The output node returns one flat tuple: the user's tensors, then one value per `updates`.
    """

    graph: fx.Graph
    leaves: dict[str, Leaf]
    """Placeholder name -> leaf."""
    out_spec: Any = None
    """Opaque: rebuilds the user's output from the flat tensors (see capture.unflatten_output)."""
    n_outputs: int = 0
    updates: tuple[str, ...] = ()
    """Placeholder names (buffers, inputs) whose new values are the trailing outputs."""
    symbols: dict[Any, tuple[str, int]] = field(default_factory=dict)
    """sympy symbol -> (input placeholder name, dim) that defines it."""
    guards: list[Any] = field(default_factory=list)
    """sympy conditions on the symbols under which the capture holds."""
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """First name of a parameter or buffer -> all its names (tied weights), itself first."""
    notes: list[str] = field(default_factory=list)
    """Things the user should know, in order."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What passes leave for later ones (the named dims, the placements, ...)."""

    def placeholders(self, kind: LeafKind | None = None) -> Iterator[fx.Node]:
        """Placeholder nodes in order, of one kind or all."""
        for node in self.graph.find_nodes(op="placeholder"):
            leaf = self.leaves.get(node.name)  # emission adds one that is the model itself
            if kind is None or (leaf is not None and leaf.kind == kind):
                yield node

    def calls(self, *targets: Any) -> Iterator[fx.Node]:
        """All call_function nodes in order, or those that call one of the targets."""
        nodes = (node for node in self.graph.nodes if node.op == "call_function")
        return (node for node in nodes if node.target in targets or not targets)

    def is_parameter(self, node: Any) -> bool:
        """Whether a node (or another argument) is a parameter."""
        leaf = self.leaves.get(node.name) if isinstance(node, fx.Node) else None
        return leaf is not None and leaf.kind == "parameter"

    def output(self) -> fx.Node:
        """The output node."""
        return next(iter(reversed(self.graph.nodes)))


def operands(node: fx.Node) -> list[fx.Node]:
    """Tensor operands of a call in argument order, lists flattened, repeats kept.

    `node.all_input_nodes` drops repeats, so `mm(y, y)` would lose one; rules are aligned with
    this list. SymInt arguments are not operands.
    """
    found: list[fx.Node] = []

    def visit(arg: Any) -> None:
        if isinstance(arg, fx.Node):
            if isinstance(arg.meta.get("val"), Tensor):
                found.append(arg)
        elif isinstance(arg, (list, tuple)):
            for item in arg:
                visit(item)

    for arg in (*node.args, *node.kwargs.values()):
        visit(arg)
    return found


def values(node: fx.Node) -> list[Tensor]:
    """Fake tensors a node produces: one, or several for a multi-output op."""
    val = node.meta.get("val")
    if isinstance(val, Tensor):
        return [val]
    if isinstance(val, (tuple, list)):
        return [v for v in val if isinstance(v, Tensor)]
    return []


def is_dynamic(size: Any) -> bool:
    """Whether a size is symbolic."""
    return isinstance(size, torch.SymInt)
