"""A program as a drawing: Graphviz DOT, and SVG with or without Graphviz."""

import shutil
import subprocess
from html import escape

from tpcompile.drawing import HEIGHT, TRAFFIC, WIDTH, Cluster, Drawing, Shape, arrange, drawing_of
from tpcompile.outline import Outline


def dot(of: Outline) -> str:
    """Graphviz DOT: a cluster a block, colour by placement, what communicates outlined.

    Blocks alike are drawn once, with their number.
    """
    drawing = drawing_of(of)
    lines = [
        "digraph program {",
        f'  label={_quoted(drawing.title)}; labelloc=t; fontname="Helvetica";',
        '  node [shape=box style="filled,rounded" fontname="Helvetica" fontsize=10];',
        '  edge [color="#70757a" arrowsize=0.6];',
    ]
    for index, cluster in enumerate(drawing.clusters):
        lines += _cluster_lines(index, cluster)
    lines += [f"  {_quoted(a)} -> {_quoted(b)};" for a, b in drawing.edges]
    return "\n".join([*lines, "}"]) + "\n"


def _cluster_lines(index: int, cluster: Cluster) -> list[str]:
    nodes = [f"    {_quoted(s.name)} [{_attributes(s)}];" for s in cluster.shapes]
    if not cluster.title:
        return nodes
    head = f'    label={_quoted(cluster.title)}; style=rounded; color="#9aa0a6";'
    return [f"  subgraph cluster_{index} {{", head, *nodes, "  }"]


def _attributes(shape: Shape) -> str:
    label = _quoted("\n".join(shape.lines))
    more = f' color="{TRAFFIC}" penwidth=2 shape=cds style=filled' if shape.traffic else ""
    return f'label={label} tooltip={_quoted(shape.tip)} fillcolor="{shape.fill}"{more}'


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def svg(of: Outline) -> str:
    """SVG, laid out by Graphviz where `dot` is installed, else in plain layers."""
    program = shutil.which("dot")
    if program is not None:
        run = subprocess.run([program, "-Tsvg"], input=dot(of), capture_output=True, text=True)
        if run.returncode == 0:
            return run.stdout
    return layered_svg(of)


def layered_svg(of: Outline) -> str:
    """SVG in layers, blocks under one another; needs nothing but Python."""
    drawing = drawing_of(of)
    width, height = arrange(drawing)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="Helvetica, Arial, sans-serif" '
        'font-size="11">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="20" y="26" font-size="15" font-weight="bold">{escape(drawing.title)}</text>',
        *(_frame(cluster, width) for cluster in drawing.clusters if cluster.title),
        *_edge_paths(drawing),
        *(_box(shape) for shape in drawing.shapes()),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _frame(cluster: Cluster, width: float) -> str:
    top = min(s.y for s in cluster.shapes) - 26
    bottom = max(s.y for s in cluster.shapes) + HEIGHT + 12
    return (
        f'<g class="block"><rect x="12" y="{top:.0f}" width="{width - 24:.0f}" '
        f'height="{bottom - top:.0f}" rx="8" fill="#f8f9fa" stroke="#9aa0a6"/>'
        f'<text x="22" y="{top + 16:.0f}" font-weight="bold" fill="#3c4043">'
        f"{escape(cluster.title)}</text></g>"
    )


def _edge_paths(drawing: Drawing) -> list[str]:
    places = {shape.name: shape for shape in drawing.shapes()}
    found = []
    for a, b in drawing.edges:
        source, target = places[a], places[b]
        x1, y1 = source.x + WIDTH / 2, source.y + HEIGHT
        x2, y2 = target.x + WIDTH / 2, target.y
        bend = (y2 - y1) / 2
        # A long edge goes round by the side of what stands between.
        around = min(x1, x2) - WIDTH * 0.75
        c1, c2 = (around, around) if y2 - y1 > 3 * HEIGHT else (x1, x2)
        found.append(
            f'<path d="M{x1:.0f} {y1:.0f}C{c1:.0f} {y1 + bend / 2:.0f} '
            f'{c2:.0f} {y2 - bend / 2:.0f} {x2:.0f} {y2:.0f}" fill="none" stroke="#9aa0a6"/>'
        )
    return found


def _box(shape: Shape) -> str:
    line = f'stroke="{TRAFFIC}" stroke-width="2.5"' if shape.traffic else 'stroke="#bdc1c6"'
    middle = shape.x + WIDTH / 2
    first, second = map(escape, shape.lines)
    return (
        f'<g class="node"><title>{escape(shape.tip)}</title>'
        f'<rect x="{shape.x:.0f}" y="{shape.y:.0f}" width="{WIDTH}" height="{HEIGHT}" '
        f'rx="{3 if shape.traffic else 8}" fill="{shape.fill}" {line}/>'
        f'<text x="{middle:.0f}" y="{shape.y + 18:.0f}" text-anchor="middle" '
        f'font-weight="bold" fill="#202124">{first}</text>'
        f'<text x="{middle:.0f}" y="{shape.y + 34:.0f}" text-anchor="middle" '
        f'fill="#3c4043">{second}</text></g>'
    )
