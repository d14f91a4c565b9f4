"""The project itself: which way imports point, what the documents claim, what files hold."""

import ast
import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from importlib.util import resolve_name
from io import StringIO
from itertools import chain
from pathlib import Path

import pytest

import tpcompile

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*ROOT.glob("tpcompile/**/*.py"), *ROOT.glob("passes/*.py")])
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
WRITTEN = [
    path
    for folder in (".ci", "docs", "examples", "passes", "tests", "tpcompile")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.is_file() and path.suffix != ".pyc"
] + [path for path in sorted(ROOT.iterdir()) if path.is_file() and path.name != ".git"]

INTERFACE = {"tpcompile", "tpcompile.__main__", "tpcompile.sharded_module"} | {
    f"tpcompile.{name}"
    for name in (
        *("advice", "advise", "backend", "backend_text", "check_prediction", "cli", "degrees"),
        *("dispatch", "emit", "piece_plan"),
        *("exchange", "explain", "layout3d", "lint", "local_shapes", "micro_pipeline", "partial"),
        *("pins",),
        *(
            "pipeline",
            "planning",
            "recapture",
            "settle_styles",
            "sharding",
            "stages",
            "verification",
        ),
    )
}
"""What joins nouns and passes; every other module of tpcompile is a noun."""
PUBLIC = ("torch.ops.", "torch._check")
"""What torch documents in spite of an underscore."""
BLOCK = re.compile(
    r"^```python run\n(?P<code>.*?)^```\n(?:\n```text\n(?P<prints>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
"""A block to run, and where a block of text follows it at once, what it has to print."""


def module_name(path: Path) -> str:
    """Dotted name of a source file: passes/emit.py is tpcompile.passes.emit."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    parts = ["tpcompile", *parts] if parts[0] == "passes" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


def imports_of(name: str) -> set[str]:
    """Modules of this project that a module imports anywhere in its text, also inside functions."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            inside = [f"{source}.{alias.name}" for alias in node.names]
            found |= {each if each in MODULES else source for each in inside}
    return found & MODULES.keys()


def is_pass(name: str) -> bool:
    """Whether a module lies in passes/."""
    return name.startswith("tpcompile.passes")


def run_page(name: str) -> list[str]:
    """What each block of a page prints, run in one namespace. Called on every rank."""
    text = (ROOT / name).read_text()
    namespace: dict[str, object] = {}
    printed = []
    for block in BLOCK.finditer(text):
        lines = "\n" * text[: block.start("code")].count("\n")
        with redirect_stdout(StringIO()) as out:
            exec(compile(lines + block["code"], name, "exec"), namespace)
        printed.append(out.getvalue())
    return printed


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_one_way(name: str) -> None:
    """Nouns import neither passes nor the interface; passes do not import the interface."""
    if name not in INTERFACE:
        wrong = {each for each in imports_of(name) if each in INTERFACE}
        if not is_pass(name):
            wrong |= {each for each in imports_of(name) if is_pass(each)}
        assert wrong == set(), f"{name} may not import these"


def test_no_import_cycles() -> None:
    """A module never imports itself by way of others."""
    order: list[str] = []

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above, name])
        if name not in order:
            for each in sorted(imports_of(name)):
                visit(each, (*above, name))
            order.append(name)

    for name in MODULES:
        visit(name, ())
    assert set(order) == set(MODULES)


def test_every_module_is_installed_and_imports() -> None:
    """Each source file is a module of the installed package, and each module of it imports."""
    installed = {"tpcompile"} | {
        info.name for info in pkgutil.walk_packages(tpcompile.__path__, "tpcompile.")
    }
    passes = importlib.import_module("tpcompile.passes")
    installed |= {
        info.name for info in pkgutil.iter_modules(passes.__path__, "tpcompile.passes.")
    } | {"tpcompile.passes"}
    assert installed == set(MODULES)
    for name in MODULES:
        importlib.import_module(name)


def test_passes_are_imported_by_their_full_name() -> None:
    """`import passes` in a checkout says what to do instead."""
    run = subprocess.run(
        [sys.executable, "-c", "import passes"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == (
        "ImportError: import tpcompile.passes, not passes; in a checkout: pip install -e ."
    )


@pytest.mark.parametrize("name", sorted(MODULES))
def test_private_torch_stands_in_one_file(name: str) -> None:
    """Only torch_private.py takes names of torch that start with an underscore."""
    if name == "tpcompile.torch_private":
        return
    private: list[str] = []
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        private += [
            f"line {node.lineno}: {each}"
            for each in names
            if re.match(r"torch\.(\w+\.)*_(?!_)", each) and not each.startswith(PUBLIC)
        ]
    assert private == [], f"{name}: import these in torch_private.py, with the reason"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_files_fit_a_sitting(name: str) -> None:
    """A source file has 300 lines at most."""
    assert len(MODULES[name].read_text().splitlines()) <= 300


@pytest.mark.parametrize("name", sorted(MODULES))
def test_doctests(name: str) -> None:
    """Every example in a docstring gives what it says."""
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


SLOW_PAGES = {"docs/compile.md", "docs/overlap.md"}
"""Each takes a quarter of a minute; what they show has tests of its own."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW_PAGES else [])
        for name in (page.relative_to(ROOT).as_posix() for page in PAGES)
    ],
)
def test_code_of_pages_runs(page: str, ranks, request: pytest.FixtureRequest) -> None:
    """Blocks marked `python run` run on two ranks and print what the page says they print."""
    text = (ROOT / page).read_text()
    blocks = list(BLOCK.finditer(text))
    if not blocks:
        return
    printed, _ = ranks("test_project:run_page", 2, page)
    if request.config.getoption("--accept"):
        for block, out in reversed(list(zip(blocks, printed, strict=True))):
            if block["prints"] is not None:
                text = text[: block.start("prints")] + out + text[block.end("prints") :]
        (ROOT / page).write_text(text)
    else:
        for block, out in zip(blocks, printed, strict=True):
            assert block["prints"] in (None, out)


def test_readme_opens_with_code_that_runs() -> None:
    """One sentence, then ten lines of Python, which the test above runs."""
    text = (ROOT / "README.md").read_text()
    block = BLOCK.search(text)
    assert block is not None
    assert block.start() == text.index("```")
    assert text[: block.start()].count(".") == 1
    assert len([line for line in block["code"].splitlines() if line]) == 10
    assert block["prints"].startswith("parameter ")


@pytest.mark.parametrize("page", [page.relative_to(ROOT).as_posix() for page in PAGES])
def test_links_of_pages_lead_somewhere(page: str) -> None:
    """Relative links name files that exist."""
    path = ROOT / page
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_constraints_pin_every_requirement() -> None:
    """Each package that pyproject.toml asks for has one exact version in constraints.txt."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    pins = re.findall(r"^([\w-]+)==[\w.]+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    names = {re.split(r"[^\w-]", each)[0] for each in wanted}
    normal = [pin.lower().replace("_", "-") for pin in pins]
    assert sorted(names - set(normal)) == []
    assert len(set(normal)) == len(normal)


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_paths_of_one_machine(path: Path) -> None:
    """No file names a place that exists on one machine only."""
    found = re.findall(r"/(?:home|root|Users|work|mnt|private)/[\w.]+", path.read_text())
    assert found == []
