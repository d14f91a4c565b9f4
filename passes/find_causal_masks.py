"""Tell attention that a mask is causal: kernels know a faster way for that than to read a mask."""

from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from tpcompile.plain_sizes import example_sizes
from tpcompile.program import Program
from tpcompile.torch_private import OpOverload, sym_expr

aten = torch.ops.aten
_LONGEST = 4200
"""Up to what length masks are computed here; bytes are its square."""
_NO_SIZE = 2**31
"""Arguments from here on are no sizes, but mean "to the end"."""


def find_causal_masks(program: Program) -> Program:
    """Replace masks that are causal whatever the sizes by `is_causal`.

    Before:  %m = le(%columns, %rows)   %y = scaled_dot_product_attention(%q, %k, %v, %m)
    After:   %y = scaled_dot_product_attention(%q, %k, %v, None, 0.0, True)

    Such a mask depends on nothing but sizes, so it can be computed here: for the example's sizes,
    and for a length beyond every number that occurs in its making, such as a sliding window.
    """
    known: dict[fx.Node, bool] = {}
    for node in list(program.calls(aten.scaled_dot_product_attention.default)):
        q, k, v, *rest = node.args
        mask = rest[0] if rest else node.kwargs.get("attn_mask")
        if not isinstance(mask, fx.Node) or not _is_square(q, k):
            continue
        if mask not in known:
            known[mask] = _is_causal(program, mask, q)
        if known[mask]:
            dropout = rest[1] if len(rest) > 1 else node.kwargs.get("dropout_p", 0.0)
            kept = {n: a for n, a in node.kwargs.items() if n in ("scale", "enable_gqa")}
            node.args, node.kwargs = (q, k, v, None, dropout, True), kept
    for mask, causal in known.items():
        if causal:
            _erase_unused(program, mask)
    return program


def _is_square(q: Any, k: Any) -> bool:
    """Whether there are as many queries as keys, whatever the sizes."""
    lengths = [each.meta["val"].shape[-2] for each in (q, k)]
    exprs = [sym_expr(n) if isinstance(n, torch.SymInt) else n for n in lengths]
    return bool(exprs[0] == exprs[1])


def _is_causal(program: Program, mask: fx.Node, q: Any) -> bool:
    nodes = _makers(program, mask)
    if nodes is None:
        return False
    length = q.meta["val"].shape[-2]
    examples = example_sizes(program)
    trials = [examples]
    if isinstance(length, torch.SymInt) and sym_expr(length).is_Symbol:
        longest = max(_numbers(nodes), default=0) + 7
        if longest > _LONGEST:
            return False
        small = dict.fromkeys(examples, 2)
        trials.append(small | {sym_expr(length): max(longest, 2 * examples[sym_expr(length)])})
    elif isinstance(length, torch.SymInt):
        return False
    try:
        return all(_is_lower(_compute(program, nodes, mask, trial)) for trial in trials)
    except Exception:
        return False  # not of these sizes: then it is what it is


def _makers(program: Program, mask: fx.Node) -> list[fx.Node] | None:
    """What computes a mask, in order; None where that is not sizes and constants alone."""
    found: dict[fx.Node, None] = {}
    waiting = [mask]
    while waiting:
        node = waiting.pop()
        if node in found or isinstance(node.meta.get("val"), (torch.SymInt, int)):
            continue
        leaf = program.leaves.get(node.name) if node.op == "placeholder" else None
        if leaf is not None and leaf.kind == "constant":
            continue
        if not isinstance(node.target, OpOverload) or _draws(node.target):
            return None
        found[node] = None
        waiting += node.all_input_nodes
    return [node for node in program.graph.nodes if node in found]


def _draws(op: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def _numbers(nodes: list[fx.Node]) -> list[int]:
    """Numbers among the arguments, and in the sizes among them."""
    found: list[int] = []

    def visit(arg: Any) -> None:
        if isinstance(arg, (list, tuple)):
            for each in arg:
                visit(each)
        elif isinstance(arg, (int, float)) and abs(arg) < _NO_SIZE:
            found.append(int(abs(arg)))
        elif isinstance(arg, fx.Node) and isinstance(arg.meta.get("val"), torch.SymInt):
            visit([int(number) for number in sym_expr(arg.meta["val"]).atoms(sympy.Integer)])

    for node in nodes:
        visit(node.args)
        visit(tuple(v for k, v in node.kwargs.items() if k != "dtype"))
    return found


def _compute(program: Program, nodes: list[fx.Node], mask: fx.Node, sizes: Any) -> Tensor:
    made: dict[fx.Node, Any] = {}

    def value(node: fx.Node) -> Any:
        if node in made:
            return made[node]
        val = node.meta["val"]
        if isinstance(val, torch.SymInt):
            return int(sym_expr(val).subs(sizes))
        leaf = program.leaves.get(node.name)
        return val if leaf is None else leaf.tensor.cpu()  # type: ignore[union-attr]

    for node in nodes:
        args, kwargs = map_arg((node.args, node.kwargs), value)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        made[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return made[mask]


def _is_lower(mask: Tensor) -> bool:
    """Whether it lets every query see the keys up to its own place."""
    if mask.ndim < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    lower = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    if mask.dtype != torch.bool:
        hidden = mask <= torch.finfo(mask.dtype).min
        if not bool(((mask == 0) | hidden).all()):
            return False
        mask = ~hidden
    return bool((mask == lower).all())


def _erase_unused(program: Program, mask: fx.Node) -> None:
    """Take away what only made a mask."""
    waiting, erased = [mask], set()
    while waiting:
        node = waiting.pop()
        if not node.users and node.op == "call_function" and node not in erased:
            waiting += node.all_input_nodes
            program.graph.erase_node(node)
            erased.add(node)
