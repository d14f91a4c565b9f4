"""Remove and merge collectives that repeat or undo one another."""

from torch import fx
from tpcompile.passes.insert_collectives import FUNCTIONS, Conversion

from tpcompile import collectives
from tpcompile.placement import ALL_REDUCE, REDUCE_SCATTER, P, R, State
from tpcompile.program import Program


def eliminate_redundant(program: Program) -> Program:
    """Merge equal conversions, cancel opposite ones, fuse and join reductions.

    Before:  %1 = all_gather(%x)   %2 = all_gather(%x)   %3 = split(%1)
    After:   %1 = all_gather(%x)                         (%3 is %x)

    Before:  %1 = all_reduce(%x)   %2 = split(%1)
    After:   %2 = reduce_scatter(%x)

    Before:  %1 = all_reduce(%x)   %2 = all_reduce(%y)   %3 = add(%1, %2)
    After:   %1 = add(%x, %y)      %3 = all_reduce(%1)
    """
    removed: list[str] = program.extra.setdefault("removed", [])
    _merge_equal(program, removed)
    for node in list(program.calls()):
        if "conversion" in node.meta and _cancel(node):
            removed.append(f"{node.name}: undoes {node.args[0]}")
    for node in list(program.calls()):
        if "conversion" in node.meta and _fuse(node):
            removed.append(f"{node.name}: all_reduce then split is one reduce_scatter")
    for node in list(program.calls()):
        if _join(node, program):
            removed.append(f"{node.name}: partial sums are added before one all_reduce")
    program.graph.eliminate_dead_code()
    return program


def _merge_equal(program: Program, removed: list[str]) -> None:
    first: dict[tuple[fx.Node, str, State], fx.Node] = {}
    for node in list(program.calls()):
        what: Conversion | None = node.meta.get("conversion")
        if what is None:
            continue
        key = (node.args[0], what.step.function, what.need)
        kept = first.setdefault(key, node)  # type: ignore[arg-type]
        if kept is not node:
            if what.value.trained and not kept.meta["conversion"].value.trained:
                # forward they are equal; backward only this one knows of the gradient
                kept.meta["conversion"] = what
            node.replace_all_uses_with(kept)
            program.graph.erase_node(node)
            removed.append(f"{node.name}: the same as {kept.name}")


def _cancel(node: fx.Node) -> bool:
    """split(all_gather(x)) of one dim is x."""
    before = node.args[0]
    outer: Conversion = node.meta["conversion"]
    inner: Conversion | None = (
        before.meta.get("conversion") if isinstance(before, fx.Node) else None
    )
    if inner is None or outer.step.function != "split" or inner.step.function != "all_gather":
        return False
    if inner.have is not outer.need:
        return False
    node.replace_all_uses_with(before.args[0])  # type: ignore[union-attr]
    return True


def _fuse(node: fx.Node) -> bool:
    """split(all_reduce(x)) with no other reader is reduce_scatter(x)."""
    before = node.args[0]
    outer: Conversion = node.meta["conversion"]
    inner: Conversion | None = (
        before.meta.get("conversion") if isinstance(before, fx.Node) else None
    )
    if inner is None or outer.step.function != "split" or inner.step is not ALL_REDUCE:
        return False
    if len(before.users) != 1:  # type: ignore[union-attr]
        return False
    node.target = FUNCTIONS["reduce_scatter"]
    node.args = before.args  # type: ignore[union-attr]
    node.meta["conversion"] = Conversion(REDUCE_SCATTER, P, outer.need, outer.value)
    return True


def _join(node: fx.Node, program: Program) -> bool:
    """add(all_reduce(x), all_reduce(y)) with no other reader is all_reduce(add(x, y))."""
    if str(node.target) != "aten.add.Tensor" or len(node.args) != 2 or node.kwargs:
        return False
    sides = node.args
    if not all(isinstance(s, fx.Node) and s.target is collectives.all_reduce for s in sides):
        return False
    if any(len(s.users) != 1 or s.meta["val"].shape != node.meta["val"].shape for s in sides):  # type: ignore[union-attr]
        return False
    with program.graph.inserting_after(node):
        joined = program.graph.call_function(collectives.all_reduce, (node,))
    node.replace_all_uses_with(joined, delete_user_cb=lambda user: user is not joined)
    node.args = tuple(s.args[0] for s in sides)  # type: ignore[union-attr]
    value = sides[0].meta["conversion"].value  # type: ignore[union-attr]
    joined.meta.update(node.meta)
    joined.meta.pop("rule", None)
    joined.meta["conversion"] = Conversion(ALL_REDUCE, P, R, value)
    return True
