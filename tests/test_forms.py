"""DOT, SVG, HTML and JSON of a plan."""

import json
import re
import xml.etree.ElementTree as ElementTree
from functools import cache
from html.parser import HTMLParser
from itertools import combinations

import models
import pytest
import torch
from test_dump import explained, small

import tpcompile
from tpcompile import draw
from tpcompile.drawing import HEIGHT, WIDTH, arrange, drawing_of
from tpcompile.outline import folded, outline

VOID = {"meta", "input", "path", "rect", "br"}


@cache
def form(kind: str) -> str:
    """A form of the Llama of `test_dump`."""
    return tpcompile.dump(explained("llama"), kind)


def llama() -> dict:
    """Its outline, by way of JSON."""
    return json.loads(form("json"))


def test_json_says_what_each_collective_sends() -> None:
    """Bytes by hand: bf16[2, 1024, 4096], of which a rank of 4 sends 3 quarters."""
    of = llama()
    assert (of["model"], of["degree"], of["rank"]) == ("LlamaForCausalLM", 4, None)
    whole = 2 * 1024 * 4096 * 2
    (gather,) = [c for c in of["collectives"] if c["kind"] == "all_gather" and c["to"] == "R*"]
    assert gather["bytes"] == whole
    assert gather["forward_bytes_sent"] == gather["backward_bytes_sent"] == whole * 3 // 4
    assert gather["formula"] == "2*b*hidden*s*(t - 1)/t"
    assert (gather["forward"], gather["backward"]) == ("all_gather", "reduce_scatter")
    assert gather["count"] == 2 * 3 + 1  # two a layer, one for the head


def test_json_nodes_name_op_dims_placement_and_module() -> None:
    """A row parallel linear, complete."""
    of = llama()
    block = next(s for s in of["sections"] if s["block"] == "model.layers.1")
    node = next(n for n in block["nodes"] if n["path"].endswith("mlp.down_proj") and n["style"])
    assert (node["op"], node["style"], node["placement"]) == ("linear", "row", ["P"])
    assert node["outputs"][0]["dims"] == ["b", "s", "hidden"]
    assert node["outputs"][0]["shape"] == ["b", "s", "4096"]
    assert node["inputs"][1] == "model.layers.1.mlp.down_proj.weight"
    assert re.fullmatch(r"modeling_llama\.py:\d+", node["where"])
    names = [n["name"] for s in of["sections"] for n in s["nodes"]]
    assert len(set(names)) == len(names)


def test_json_parameters_have_local_bytes() -> None:
    """A quarter of a split weight, all of a norm's."""
    found = {p["name"]: p for p in llama()["parameters"]}
    up, norm = found["model.layers.0.mlp.up_proj.weight"], found["model.norm.weight"]
    assert up["bytes"] == 11008 * 4096 * 2 == 4 * up["local_bytes"]
    assert norm["bytes"] == norm["local_bytes"] == 4096 * 2


def test_blocks_alike_are_folded() -> None:
    """All layers are one section, between what comes before and after them."""
    paths = [each for _, each in folded(llama()["sections"]) if each[0]]
    assert paths == [[f"model.layers.{i}" for i in range(3)]]
    likes = [s["like"] for s in llama()["sections"] if s["block"]]
    assert likes == [None, "model.layers.0", "model.layers.0"]


def test_dot_is_whole_and_folded() -> None:
    """Every edge joins nodes that are drawn; traffic is drawn apart; a block for all like it."""
    text = form("dot")
    nodes = set(re.findall(r'^    ?(?:  )?("\d+:[^"]+") \[', text, re.MULTILINE))
    edges = re.findall(r'^  ("[^"]+") -> ("[^"]+");$', text, re.MULTILINE)
    assert edges
    assert {end for edge in edges for end in edge} <= nodes
    assert text.count("{") == text.count("}")
    assert 'label="model.layers.0 ... model.layers.2 (x 3)"' in text
    gathers = [line for line in text.splitlines() if 'label="all_gather' in line]
    assert gathers
    assert all("shape=cds" in line for line in gathers)


def test_svg_boxes_do_not_overlap() -> None:
    """The layout without Graphviz: well-formed, every box in the picture and on its own."""
    of = outline(explained("llama").program)
    root = ElementTree.fromstring(draw.layered_svg(of))
    boxes = [
        tuple(float(rect.get(key, "nan")) for key in ("x", "y", "width", "height"))
        for group in root.iter("{http://www.w3.org/2000/svg}g")
        if group.get("class") == "node"
        for rect in group.iter("{http://www.w3.org/2000/svg}rect")
    ]
    assert len(boxes) == len(list(drawing_of(of).shapes()))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for x, y, w, h in boxes:
        assert 0 <= x <= width - w
        assert 0 <= y <= height - h
    for (x, y, *_), (u, v, *_) in combinations(boxes, 2):
        assert abs(x - u) >= WIDTH or abs(y - v) >= HEIGHT


def test_edges_of_a_drawing_lead_down() -> None:
    """What is read stands above what reads it."""
    drawing = drawing_of(outline(small().planned))
    arrange(drawing)
    place = {shape.name: shape.y for shape in drawing.shapes()}
    assert drawing.edges
    assert all(place[a] < place[b] for a, b in drawing.edges)


def test_svg_is_graphviz_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `dot` on the path it lays out; where that fails, the own layout does."""
    of = outline(small().planned)
    asked = []

    def run(command, **kwargs):
        asked.append((command, kwargs["input"]))
        code = 0 if len(asked) == 1 else 1
        return draw.subprocess.CompletedProcess(command, code, stdout="<svg/>")

    monkeypatch.setattr(draw.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(draw.subprocess, "run", run)
    assert draw.svg(of) == "<svg/>"
    assert asked == [(["/bin/dot", "-Tsvg"], draw.dot(of))]
    assert draw.svg(of) == draw.layered_svg(of)


class Page(HTMLParser):
    """Tags, texts by the id of the table they are in, and rows of nodes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.cells: dict[str, list[list[str]]] = {}
        self.table = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        """Keep track of what is open."""
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self.table = dict(attrs).get("id", "")
        if tag == "tr":
            self.cells.setdefault(self.table, []).append([])
        if tag == "td" and self.table:
            self.cells[self.table][-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        """Every end tag ends what was opened last."""
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        """Text of cells of named tables."""
        if self.table and self.cells[self.table][-1:] and "td" in self.open:
            self.cells[self.table][-1][-1] += data


def test_html_is_whole_and_needs_no_network() -> None:
    """Tags match, and nothing in the page names another file or host."""
    text = form("html")
    page = Page(text)
    assert page.open == []
    assert not [a for _, a in page.tags if {"src", "href", "srcset"} & a.keys()]
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert "$" not in re.sub(r"\\\$", "", text)


def test_html_tables_summarize() -> None:
    """Parameters of all layers are one row; collectives are counted and added up."""
    page = Page(form("html"))
    parameters = {row[0]: row[1:] for row in page.cells["parameters"] if row}
    assert parameters["model.layers.*.mlp.down_proj.weight"] == [
        "bf16[hidden, ffn]", "4096 x 11008", "S(ffn)", "row", "21.5 MiB", "3",
    ]  # fmt: skip
    rows = page.cells["collectives"]
    gather = next(row for row in rows if row[:2] == ["all_gather", "S(s) to R*"])
    assert gather[2:] == [
        "all_gather", "reduce_scatter", "2*b*hidden*s*(t - 1)/t", "24.0 MiB", "7", "168.0 MiB",
    ]  # fmt: skip


def test_html_nodes_can_be_filtered_and_hovered() -> None:
    """Each row says its collectives and module, and what hovering shows; a button a collective."""
    page = Page(form("html"))
    rows = [a for tag, a in page.tags if tag == "tr" and "node" in a.get("class", "").split()]
    shown = [n for s, _ in folded(llama()["sections"]) for n in s["nodes"]]
    assert len(rows) == len(shown)
    kinds = {kind for row in rows for kind in row["data-kinds"].split()}
    buttons = {a["data-kind"] for tag, a in page.tags if tag == "button" and "data-kind" in a}
    assert buttons == {"", *kinds}
    down = next(r for r in rows if r["data-path"].endswith("down_proj") and not r["data-kinds"])
    assert down["data-tip"].splitlines()[1:4] == [
        "bf16 [b, s, hidden = 4096]", "placement P", "row parallel",
    ]  # fmt: skip
    assert [tag for tag, _ in page.tags].count("details") == 1 + len(folded(llama()["sections"]))


def test_forms_of_a_model_without_blocks() -> None:
    """One section, in every form."""
    found = tpcompile.stages(models.MLP(), torch.ones(2, 4, 8), tp=2)
    of = json.loads(tpcompile.dump(found, "json"))
    assert [s["block"] for s in of["sections"]] == [""]
    for kind in ("dot", "svg", "html"):
        assert "linear up" in tpcompile.dump(found, kind)


def test_dump_writes_a_file(tmp_path) -> None:
    """`file=` gets what is returned."""
    text = tpcompile.dump(small(), "html", file=tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text() == text
    block = tpcompile.dump(small(), "json", block="blocks.1")
    assert [s["block"] for s in json.loads(block)["sections"]] == ["blocks.1"]
