"""A program as one HTML page that needs no network."""

import re
from collections import Counter
from html import escape
from importlib.resources import files
from itertools import groupby
from string import Template
from typing import Any

from tpcompile.draw import layered_svg
from tpcompile.formulas import bytes_text
from tpcompile.outline import Outline, folded

_CLASSES = {"R": "R", "R*": "Rs", "P": "P"}


def page(of: Outline) -> str:
    """Tables of parameters and collectives, the drawing, and every block with its nodes."""
    template = Template((files("tpcompile") / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(of["model"] or "program"),
        facts=escape(_facts(of)),
        parameters=_parameters(of),
        collectives=_collectives(of),
        notes="".join(f"<p>{escape(note)}</p>" for note in of["notes"]),
        drawing=layered_svg(of),
        buttons=_buttons(of),
        sections="\n".join(_section(s, paths) for s, paths in folded(of["sections"])),
    )


def _facts(of: Outline) -> str:
    parameters = of["parameters"]
    whole = sum(p["bytes"] for p in parameters)
    local = sum(p.get("local_bytes", p["bytes"]) for p in parameters)
    rank = "" if of["rank"] is None else f", as rank {of['rank']} runs it"
    return (
        f"{of['degree']} ranks{rank}; {len(parameters)} parameters, {bytes_text(whole)}, "
        f"{bytes_text(local)} a rank"
    )


def _parameters(of: Outline) -> str:
    """Parameters that differ in nothing but the number of their block are one row."""
    rows: Counter[tuple[str, ...]] = Counter()
    for each in of["parameters"]:
        name = re.sub(r"(^|\.)\d+(?=\.)", r"\1*", each["name"])
        shape = " x ".join(each["shape"]) or "scalar"
        local = bytes_text(each.get("local_bytes", each["bytes"]))
        rows[name, each["type"], shape, each["placement"], each.get("style", ""), local] += 1
    cells = [
        f"<td><code>{escape(name)}</code></td><td><code>{escape(kind)}</code></td>"
        f"<td>{escape(shape)}</td><td>{_pill(placement)}</td><td>{escape(style)}</td>"
        f'<td class="n">{escape(local)}</td><td class="n">{count}</td>'
        for (name, kind, shape, placement, style, local), count in rows.items()
    ]
    heads = ["parameter", "dims", "shape", "placement", "style", "#bytes a rank", "#count"]
    return _table("parameters", heads, cells)


def _collectives(of: Outline) -> str:
    cells = []
    for each in of["collectives"]:
        sent = each["forward_bytes_sent"] + each["backward_bytes_sent"]
        moves = [each["forward"] or "none", each["backward"] or "none"]
        cells.append(
            f"<td><code>{escape(each['kind'])}</code></td>"
            f"<td>{_pill(each['from'])} to {_pill(each['to'])}</td>"
            f"<td>{moves[0]}</td><td>{moves[1]}</td><td><code>{escape(each['formula'])}</code></td>"
            f'<td class="n">{bytes_text(sent)}</td><td class="n">{each["count"]}</td>'
            f'<td class="n">{bytes_text(sent * each["count"])}</td>'
        )
    heads = ["kind", "placement", "forward", "backward", "bytes a rank sends, once"]
    return _table("collectives", [*heads, "#both ways", "#count", "#in all"], cells)


def _table(name: str, heads: list[str], cells: list[str]) -> str:
    shown = "".join(
        f'<th class="n">{head[1:]}</th>' if head.startswith("#") else f"<th>{head}</th>"
        for head in heads
    )
    body = "\n".join(f"<tr>{each}</tr>" for each in cells)
    return f'<table id="{name}"><thead><tr>{shown}</tr></thead><tbody>\n{body}\n</tbody></table>'


def _buttons(of: Outline) -> str:
    kinds = list(dict.fromkeys(each["kind"] for each in of["collectives"]))
    return "".join(
        f'<button class="kind" type="button" data-kind="{kind}" '
        f'aria-pressed="{str(not kind).lower()}">{kind or "everything"}</button>'
        for kind in ("", *kinds)
    )


def _section(section: dict[str, Any], paths: list[str]) -> str:
    title = paths[0] or "outside of blocks"
    if len(paths) > 1:
        title = f"{paths[0]} \u2026 {paths[-1]} (x {len(paths)})"
    kinds = Counter(c["kind"] for node in section["nodes"] for c in node["conversions"])
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    rows = []
    for path, run in groupby(section["nodes"], lambda node: node["path"]):
        if path:
            rows.append(f'<tr class="module"><td colspan="4">{escape(path)}</td></tr>')
        rows += map(_row, run)
    inside = "\n".join(rows)
    more = f"{len(section['nodes'])} nodes" + (f"; {counts}" if counts else "")
    return (
        f'<details class="section"{" open" if section["block"] else ""}>'
        f'<summary>{escape(title)}<span class="more">{escape(more)}</span></summary>'
        f'<div class="inside"><table class="nodes"><tbody>\n{inside}\n</tbody></table></div>'
        "</details>"
    )


def _row(node: dict[str, Any]) -> str:
    kinds = " ".join(c["kind"] for c in node["conversions"])
    traffic = any(c["forward"] or c["backward"] for c in node["conversions"])
    placement = " ".join(_pill(p) for p in dict.fromkeys(node["placement"]))
    remarks = ", ".join(r for r in node["remarks"] if r and not node["path"].endswith(r))
    remark = f' <span class="remark"># {escape(remarks)}</span>' if remarks else ""
    return (
        f'<tr class="node{" traffic" if traffic else ""}" data-kinds="{escape(kinds)}" '
        f'data-weighed="{str(node["weighed"]).lower()}" data-path="{escape(node["path"])}" '
        f'data-tip="{escape(_tip(node))}"><td>{escape(node["name"])}</td>'
        f"<td>{escape(node['type'])}</td><td>{placement}</td>"
        f"<td>{escape(node['text'])}{remark}</td></tr>"
    )


def _tip(node: dict[str, Any]) -> str:
    """What hovering over a node shows: dims with their sizes, where it is from, what it sends."""
    lines = [f"{node['name']}: {node['op']}"]
    for each in node["outputs"]:
        sizes = zip(each["dims"], each["shape"], strict=True)
        shown = ", ".join(d if d == n else f"{d} = {n}" for d, n in sizes)
        lines.append(f"{each['dtype']} [{shown}]")
    if node["placement"]:
        lines.append(f"placement {' '.join(dict.fromkeys(node['placement']))}")
    if node["style"]:
        lines.append(f"{node['style']} parallel")
    for each in node["conversions"]:
        lines.append(f"{each['kind']}: {each['from']} to {each['to']}")
        for way in ("forward", "backward"):
            if each[way]:
                sent = bytes_text(each[f"{way}_bytes_sent"])
                lines.append(f"{way}: {each[way]}, {sent} a rank")
        lines.append(f"bytes: {each['formula']}")
    lines += [f"module {node['path']}"] if node["path"] else []
    lines += [f"source {node['where']}"] if node["where"] else []
    return "\n".join(lines)


def _pill(placement: str) -> str:
    kind = _CLASSES.get(placement, "S")
    return f'<span class="pill {kind}">{escape(placement)}</span>' if placement else ""
