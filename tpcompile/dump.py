"""The text form of a program: one line a node, stable between runs."""

from typing import Any

from torch import fx

from tpcompile.labels import Labels
from tpcompile.program import Program


def dump(program: Program, *, block: str = "") -> str:
    """One line a node: value, dtype and shape by named dim, placement, op, module path.

    A program whose blocks have been split off has a section for every distinct block.  `block`
    asks for one block alone, with names relative to it.
    """
    if block:
        return "\n".join(_one_block(program, block)) + "\n"
    labels = Labels(program)
    lines = [f"# rank {labels.axis[2]} of {labels.axis[1]}"] if labels.axis else []
    lines += [line(node, labels) for node in program.graph.nodes]
    for paths, inside in distinct_blocks(program):
        lines += ["", f"block {', '.join(paths)}:", *(f"  {each}" for each in inside)]
    return "\n".join(lines) + "\n"


def distinct_blocks(program: Program) -> list[tuple[list[str], list[str]]]:
    """(paths of all blocks that read alike, lines of one) of a program with blocks of its own."""
    found: dict[tuple[str, ...], list[str]] = {}
    for path in program.extra.get("blocks", ()):
        found.setdefault(tuple(_own_graph(program, path)), []).append(path)
    return [(paths, list(lines)) for lines, paths in found.items()]


def _own_graph(program: Program, path: str) -> list[str]:
    labels = block_labels(program, path)
    return [line(node, labels) for node in program.extra["blocks"][path].graph.nodes]


def block_labels(program: Program, path: str) -> Labels:
    """Labels for the graph of one split-off block."""
    labels, block = Labels(program, path), program.extra["blocks"][path]
    leaves = list(block.graph.find_nodes(op="placeholder"))[block.n_inputs :]
    for node, name in zip(leaves, block.parameters, strict=True):
        labels.names[node] = labels.path(program.leaves[name].name)
    return labels


def _one_block(program: Program, path: str) -> list[str]:
    if path in program.extra.get("blocks", ()):
        return _own_graph(program, path)
    labels = Labels(program, path)
    inside = [n for n in program.calls() if labels.block(n) == path]
    read = {source for node in inside for source in node.all_input_nodes}
    leaves = [n for n in program.placeholders("parameter") if n in read]
    return [line(node, labels) for node in (*leaves, *inside)]


def line(node: fx.Node, labels: Labels) -> str:
    """The line of one node."""
    if node.op == "output":
        return f"return {labels.arg(node.args[0])}"
    head = f"{labels.value(node)} : {labels.type(node)}"
    placement = labels.placement(node)
    if placement:
        head += f" {placement}"
    remark = ", ".join(remarks(node, labels))
    return f"{head} = {expression(node, labels)}" + (f"  # {remark}" if remark else "")


def expression(node: fx.Node, labels: Labels) -> str:
    """What stands right of the equals sign: the kind of a leaf, or the call."""
    if node.op == "placeholder":
        leaf = labels.program.leaves.get(node.name)
        return "parameter" if node in labels.names else leaf.kind if leaf else "input"
    return f"{labels.op(node)}({labels.args(node)})"


def remarks(node: fx.Node, labels: Labels) -> list[str]:
    """Module path, style of the parameter that is read, what a conversion converts."""
    if node.op == "placeholder":
        return []
    found = []
    parameters = [name for name in map(_parameter(labels), node.all_input_nodes) if name]
    path = node.meta.get("path", "")
    # The name of a parameter says which module it is.
    if path and not any(name.startswith(f"{path}.") for name in parameters):
        found.append(labels.path(path))
    style = style_of_call(node, labels)
    if style:
        found.append(f"{style} parallel")
    for what in conversions(node)[:1]:
        backward = what.step.backward if what.value.trained else ""
        change = f"{labels.state(what.have, node)} -> {labels.state(what.need, node)}"
        found.append(change + (f", backward {backward}" if backward else ""))
    return [each for each in found if each]


def style_of_call(node: fx.Node, labels: Labels) -> str:
    """`column`, `row` or `vocab` where a call reads a weight matrix that is split so."""
    styles: dict[str, str] = labels.program.extra.get("styles", {})
    for source in node.all_input_nodes if "conversion" not in node.meta else ():
        val = source.meta.get("val")
        style = styles.get(_parameter(labels)(source), "")
        if style in ("column", "row", "vocab") and val is not None and val.ndim > 1:
            return style
    return ""


def conversions(node: fx.Node) -> list[Any]:
    """The conversions a node does: none, one (with linears or alone), or those of a bucket."""
    one = node.meta.get("conversion") or node.meta.get("fused")
    return [one] if one is not None else node.meta.get("bucket", [])


def _parameter(labels: Labels) -> Any:
    """A function from a node to the full name of the parameter that it is, or ""."""

    def name(node: fx.Node) -> str:
        if node in labels.names:
            return f"{labels.within}.{labels.names[node]}" if labels.within else labels.names[node]
        leaf = labels.program.leaves.get(node.name) if node.op == "placeholder" else None
        return leaf.name if leaf is not None and leaf.kind == "parameter" else ""

    return name
