"""A program as plain data: what the JSON, DOT, SVG and HTML forms are made from."""

from collections import Counter
from functools import lru_cache
from typing import Any

import sympy
from torch import fx

from tpcompile.cost import bytes_of
from tpcompile.dims import Dim
from tpcompile.dump import block_labels, conversions, expression, remarks, style_of_call
from tpcompile.formulas import VOLUME, T
from tpcompile.labels import Labels, dtype_text
from tpcompile.program import Program, values

Outline = dict[str, Any]


def outline(program: Program) -> Outline:
    """Sections in graph order, each the root's nodes or one block's; parameters; collectives.

    Only dicts, lists, texts, numbers and None, in one fixed order.
    """
    labels = Labels(program)
    sections = _fold(_split(program) if "blocks" in program.extra else _marked(program, labels))
    return {
        "model": program.extra.get("model", ""),
        "degree": program.extra["cost"].size if "cost" in program.extra else 1,
        "rank": labels.axis[2] if labels.axis else None,
        "parameters": _parameters(program, labels),
        "inputs": [_leaf(node, labels) for node in program.placeholders("input")],
        "sections": sections,
        "collectives": _collectives(sections),
        "notes": list(program.notes),
    }


def _marked(program: Program, labels: Labels) -> list[dict[str, Any]]:
    """Sections of a program whose nodes say which block they belong to."""
    sections: list[dict[str, Any]] = []
    blocks: dict[str, dict[str, Any]] = {}
    inside: dict[str, Labels] = {}
    for node in program.calls():
        path = labels.block(node)
        if path and path not in blocks:
            sections.append({"block": path, "nodes": []})
            blocks[path], inside[path] = sections[-1], Labels(program, path)
        elif not path and (not sections or sections[-1]["block"]):
            sections.append({"block": "", "nodes": []})
        section = blocks[path] if path else sections[-1]
        section["nodes"].append(_node(node, labels, inside.get(path, labels)))
    return sections


def _split(program: Program) -> list[dict[str, Any]]:
    """Sections of a program whose blocks have graphs of their own."""
    labels = Labels(program)
    root = [_node(n, labels, labels) for n in program.calls()]
    sections = [{"block": "", "nodes": root}]
    for path, block in program.extra["blocks"].items():
        own = block_labels(program, path)
        shown = [_node(n, own, own) for n in block.graph.nodes if n.op != "output"]
        sections.append({"block": path, "nodes": shown})
    return sections


def _node(node: fx.Node, labels: Labels, inside: Labels) -> dict[str, Any]:
    """One node; `text` is its right-hand side with names relative to the block."""
    return {
        "name": labels.value(node),
        "op": labels.op(node) if node.op == "call_function" else "input",
        "type": inside.type(node),
        "text": expression(node, inside),
        "inputs": [labels.value(source) for source in node.all_input_nodes],
        "placement": [labels.state(state, node) for state in labels.states(node)],
        "outputs": [
            {
                "dtype": dtype_text(val.dtype),
                "shape": [labels.size(size) for size in val.shape],
                "dims": labels.dims(node, i),
            }
            for i, val in enumerate(values(node))
        ],
        "path": node.meta.get("path", ""),
        "where": node.meta.get("where", ""),
        "style": style_of_call(node, inside),
        "remarks": remarks(node, inside),
        "weighed": node.meta.get("weighed", False),
        "conversions": [_conversion(what, node, labels) for what in conversions(node)],
    }


def _conversion(what: Any, node: fx.Node, labels: Labels) -> dict[str, Any]:
    """A change of placement, and what each rank sends for it."""
    forward = what.step.forward
    backward = what.step.backward if what.value.trained else ""
    size, nbytes = labels.program.extra["cost"].size, what.value.nbytes
    sent = {kind: float(VOLUME[kind].subs(T, size) * nbytes) if kind else 0.0
            for kind in (forward, backward)}  # fmt: skip
    return {
        "kind": what.step.function,
        "from": labels.state(what.have, node),
        "to": labels.state(what.need, node),
        "forward": forward or None,
        "backward": backward or None,
        "bytes": nbytes,
        "forward_bytes_sent": round(sent[forward]),
        "backward_bytes_sent": round(sent[backward]),
        "formula": _formula(node, forward or backward, labels),
    }


def _formula(node: fx.Node, kind: str, labels: Labels) -> str:
    """Bytes that a rank sends, such as `2*b*s*hidden*2*(t - 1)/t`."""
    if not kind:
        return ""
    val, dims = values(node)[0], node.meta["dims"][0]
    return _factored(labels.symbols.size(dims) * val.dtype.itemsize * VOLUME[kind])


@lru_cache(maxsize=256)
def _factored(expression: Any) -> str:
    return str(sympy.factor(expression))


def _leaf(node: fx.Node, labels: Labels) -> dict[str, Any]:
    return {
        "name": labels.value(node),
        "type": labels.type(node),
        "shape": [labels.size(size) for size in node.meta["val"].shape],
        "placement": labels.placement(node),
    }


def _parameters(program: Program, labels: Labels) -> list[dict[str, Any]]:
    styles: dict[str, str] = program.extra.get("styles", {})
    found = []
    for node in program.placeholders("parameter"):
        name, val = program.leaves[node.name].name, node.meta["val"]
        parts = {}
        if styles:
            state = labels.states(node)[0]
            split = _local_bytes(val, state, program)
            parts = {"style": styles.get(name, ""), "local_bytes": split}
        found.append({**_leaf(node, labels), "bytes": bytes_of(val), **parts})
    return found


def _local_bytes(val: Any, state: Any, program: Program) -> int:
    """Bytes of the largest share."""
    nbytes = bytes_of(val)
    if not isinstance(state, Dim):
        return nbytes
    units, size = program.extra["sizes"].hint(state.size), program.extra["cost"].size
    return nbytes // units * -(-units // size)


def _fold(sections: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Set `like` of a block that reads as an earlier one, but for the names of values, to it."""
    first: dict[Any, str] = {}
    for section in sections:
        key = _key(section) if section["block"] else object()
        like = first.setdefault(key, section["block"])
        section["like"] = None if like == section["block"] else like
    return sections


def _key(section: dict[str, Any]) -> Any:
    numbers: dict[str, int] = {}

    def number(name: str) -> int | str:
        return numbers.setdefault(name, len(numbers)) if name.startswith("%") else ""

    return tuple(
        (
            *(number(name) for name in (*node["inputs"], node["name"])),
            node["op"], node["type"], tuple(node["placement"]), node["style"],
            tuple(tuple(c.values()) for c in node["conversions"]),
        )
        for node in section["nodes"]
    )  # fmt: skip


def _collectives(sections: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Conversions alike, with counts and the bytes of all of them."""
    counts: Counter[tuple[Any, ...]] = Counter()
    for section in sections:
        for node in section["nodes"]:
            for each in node["conversions"]:
                counts[tuple(each.items())] += 1
    return [{**dict(key), "count": count} for key, count in counts.items()]


def folded(sections: list[dict[str, Any]]) -> list[tuple[dict[str, Any], list[str]]]:
    """(section, paths of the blocks that read like it, itself first), the others left out."""
    alike: dict[str, list[str]] = {}
    for section in sections:
        alike.setdefault(section["like"] or section["block"], []).append(section["block"])
    return [(s, alike[s["block"]] if s["block"] else [""]) for s in sections if not s["like"]]
