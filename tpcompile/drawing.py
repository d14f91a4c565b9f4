"""Which nodes a drawing shows, how it labels and colours them, and where it puts them."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from tpcompile.outline import Outline, folded

COLOURS = {"R": "#e8eaed", "R*": "#fde7c8", "P": "#f9d0cd", "S": "#cfe5fb", "": "#ffffff"}
"""Placement -> fill."""
TRAFFIC = "#b23b8a"
"""Line of a node that communicates."""
_ALONE = ("embedding", "scaled_dot_product_attention", "cross_entropy_loss", "input")
WIDTH, HEIGHT = 216, 44
_GAP_X, _GAP_Y = 26, 30


@dataclass
class Shape:
    """One drawn node."""

    name: str
    lines: tuple[str, str]
    fill: str
    traffic: bool
    tip: str
    layer: int = 0
    x: float = 0.0
    y: float = 0.0


@dataclass
class Cluster:
    """The nodes of the root between two blocks, or of one block and all like it."""

    title: str
    shapes: list[Shape] = field(default_factory=list)


@dataclass
class Drawing:
    """Clusters in order, and edges by name of node."""

    title: str
    clusters: list[Cluster]
    edges: list[tuple[str, str]]

    def shapes(self) -> Iterator[Shape]:
        """All shapes."""
        return (shape for cluster in self.clusters for shape in cluster.shapes)


def drawing_of(of: Outline) -> Drawing:
    """What to draw: a block for all like it, and only values that depend on a parameter.

    Masks, positions and rotary tables are the same on every rank and would hide the rest.
    """
    clusters: list[Cluster] = []
    shown: dict[tuple[str, str], str] = {}
    stands_for: dict[str, str] = {}
    sections: dict[str, dict[str, Any]] = {s["block"]: s for s in of["sections"] if s["block"]}
    for index, (section, paths) in enumerate(folded(of["sections"])):
        nodes = [n for n in section["nodes"] if n["weighed"]]
        if not nodes:
            continue
        shapes = []
        for group in _groups(nodes):
            key = f"{index}:{group[0]['name']}"
            shapes.append(_shape(key, group))
            shown.update({(section["block"], node["name"]): key for node in group})
        clusters.append(Cluster(_title(paths), shapes))
        for path in paths if section["block"] else ():
            for mine, theirs in zip(section["nodes"], sections[path]["nodes"], strict=True):
                stands_for[theirs["name"]] = mine["name"]
    edges = _edges(of, shown, stands_for)
    title = f"{of['model'] or 'program'}, {of['degree']} ranks"
    return Drawing(title, clusters, edges)


def _title(paths: list[str]) -> str:
    if not paths[0]:
        return ""
    return paths[0] if len(paths) == 1 else f"{paths[0]} ... {paths[-1]} (x {len(paths)})"


def _edges(
    of: Outline, shown: dict[tuple[str, str], str], stands_for: dict[str, str]
) -> list[tuple[str, str]]:
    """Edges between shown nodes; a block that is left out is its stand-in."""
    by_name: dict[str, str] = {}
    found: dict[tuple[str, str], None] = {}
    for section, _ in folded(of["sections"]):
        for node in section["nodes"]:
            key = shown.get((section["block"], node["name"]))
            if key is None:
                continue
            inputs: list[str] = node["inputs"]
            for name in inputs:
                source = stands_for.get(name, name)
                local = shown.get((section["block"], source)) or by_name.get(source)
                if local is not None and local != key:
                    found[local, key] = None
            by_name[node["name"]] = key
    return list(found)


def _groups(nodes: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Runs of small ops of one module and placement, drawn as one; what matters stands alone."""
    return [
        [node for _, node in run] for _, run in groupby(enumerate(nodes), lambda pair: _kind(*pair))
    ]


def _kind(place: int, node: dict[str, Any]) -> Any:
    """Equal for neighbours that are drawn as one."""
    alone = node["conversions"] or node["style"] or node["op"].startswith(_ALONE)
    return place if alone or _weight(node) else (node["path"], tuple(node["placement"][:1]))


def _weight(node: dict[str, Any]) -> str:
    """What a drawing calls the parameter that a node reads: a weight is its module's."""
    names = [n for n in node["inputs"] if not n.startswith("%") and "." in n]
    if node["conversions"]:
        return ".".join(names[0].split(".")[-2:]) if names else ""
    weights = [n for n in names if n.endswith(".weight")]
    return weights[-1].removesuffix(".weight").rpartition(".")[2] if weights else ""


def _shape(key: str, group: list[dict[str, Any]]) -> Shape:
    node = group[-1]
    ops = [n["op"].split(".")[0] for n in group]
    module = node["path"].rpartition(".")[2]
    first = f"{ops[0]} {_weight(node)}" if len(group) == 1 else f"{module}: {', '.join(ops)}"
    placement = node["placement"][0] if node["placement"] else ""
    fill = COLOURS["S" if placement.startswith("S(") else placement]
    traffic = any(c["forward"] or c["backward"] for c in node["conversions"])
    lines = (_short(first.strip(), 32), _short(_dims(node), 36))
    return Shape(key, lines, fill, traffic, "\n".join(map(_tip, group)))


def _tip(node: dict[str, Any]) -> str:
    placement = " ".join(dict.fromkeys(node["placement"]))
    line = f"{node['name']} : {node['type']} {placement} = {node['text']}"
    return "  # ".join(filter(None, (line, ", ".join(node["remarks"]))))


def _dims(node: dict[str, Any]) -> str:
    dims = ", ".join(node["outputs"][0]["dims"]) if node["outputs"] else ""
    placement = " ".join(dict.fromkeys(node["placement"]))
    return f"{placement} [{dims}]".strip()


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "\u2026"


def arrange(drawing: Drawing) -> tuple[float, float]:
    """Set the places of all shapes, cluster under cluster; returns (width, height).

    Layers by longest path; in a layer, shapes stand under the mean of what they read.
    """
    by_name = {shape.name: shape for shape in drawing.shapes()}
    sources: dict[str, list[Shape]] = defaultdict(list)
    for source, target in drawing.edges:
        sources[target].append(by_name[source])
    top = 30.0
    for cluster in drawing.clusters:
        top += 34
        for row in _layers(cluster, sources):
            for shape, x in zip(row, _spread(row, sources), strict=True):
                shape.x, shape.y = x, top
            top += HEIGHT + _GAP_Y
        top += 10
    left = min((s.x for s in drawing.shapes()), default=0.0)
    for shape in drawing.shapes():
        shape.x += 40 - left
    return max((s.x + WIDTH + 40 for s in drawing.shapes()), default=WIDTH), top


def _layers(cluster: Cluster, sources: dict[str, list[Shape]]) -> list[list[Shape]]:
    """Shapes of a cluster by layer; one that reads nothing in it stands above its first reader."""
    inside = {shape.name for shape in cluster.shapes}
    readers: dict[str, list[Shape]] = defaultdict(list)
    for shape in cluster.shapes:
        above = [s for s in sources[shape.name] if s.name in inside]
        shape.layer = max((s.layer for s in above), default=-1) + 1
        for source in above:
            readers[source.name].append(shape)
    layers: dict[int, list[Shape]] = defaultdict(list)
    for shape in cluster.shapes:
        if not sources[shape.name] and readers[shape.name]:
            shape.layer = max(min(s.layer for s in readers[shape.name]) - 1, 0)
        layers[shape.layer].append(shape)
    return [row for _, row in sorted(layers.items())]


def _spread(row: list[Shape], sources: dict[str, list[Shape]]) -> list[float]:
    """Left edges: as near to the mean of the sources as the neighbours allow, others rightmost."""
    wanted: list[float | None] = []
    for shape in row:
        above = sources[shape.name]
        wanted.append(sum(s.x for s in above) / len(above) if above else None)
    order = sorted(range(len(row)), key=lambda i: (wanted[i] is None, wanted[i] or 0.0, i))
    placed: dict[int, float] = {}
    least = float("-inf")
    for i in order:
        want = wanted[i]
        first = 0.0 if not placed else least
        placed[i] = max(least, first if want is None else want)
        least = placed[i] + WIDTH + _GAP_X
    moved = [want - placed[i] for i, want in enumerate(wanted) if want is not None]
    shift = sum(moved) / len(moved) if moved else 0.0
    return [placed[i] + shift for i in range(len(row))]
