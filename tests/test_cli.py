"""The command line as a newcomer meets it: every verb in a process of its own, and errors."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import tpcompile
from tpcompile.cli import main
from tpcompile.progress import progress
from tpcompile.verification import Difference

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
FACTORY = '''
import torch
from torch import nn

class MLP(nn.Module):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

def make():
    return MLP(), {"x": torch.randn(2, 4, 64)}

def number():
    return 3
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a Llama's config in llama/, and factories.py."""
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "factories.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("factories", None)
    return tmp_path


def start(*words: str, code: int = 0) -> tuple[str, str]:
    """(stdout, stderr) of `python -m tpcompile WORDS`, which has to end with `code`."""
    done = subprocess.run(
        [sys.executable, "-m", "tpcompile", *words],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def said(capsys: pytest.CaptureFixture, *words: str, code: int = 0) -> tuple[str, str]:
    """(stdout, stderr) of the same in this process, to save its start."""
    capsys.readouterr()
    assert main(words) == code
    return capsys.readouterr()


def test_help() -> None:
    """Help shows every verb, a command for each, and the exit codes."""
    out, _ = start("--help")
    for verb in ("explain", "advise", "verify", "dump", "export", "lint", "calibrate"):
        assert f"\n    {verb}" in out
        assert f"\n  tpcompile {verb} " in out
    assert "exit code: 0 all is well" in out


def test_explain(folder: Path) -> None:
    """Tables of a config in a folder, a page and a drawing, and the plan saved."""
    out, _ = start(
        "explain", "llama", "--tp", "2", "--html", "plan.html", "--svg", "plan.svg",
        "--save-plan", "plan.json",
    )  # fmt: skip
    assert out.startswith("2 ranks of h100-nvlink, ")
    assert "s = 32" in out
    assert "model.layers.*.mlp.down_proj.weight" in out
    assert (folder / "plan.html").read_text().lower().startswith("<!doctype html>")
    assert "<svg" in (folder / "plan.svg").read_text()
    assert tpcompile.Plan.load(folder / "plan.json").size == 2


def test_verify(folder: Path) -> None:
    """A config gets random weights and is equal on one device and on two ranks."""
    out, _ = start("verify", "llama/config.json", "--tp", "2", "--set", "num_hidden_layers=1")
    assert out.startswith("2 ranks, ")
    assert "equal to one device" in out.splitlines()[0]


def test_advise(folder: Path) -> None:
    """Degrees side by side, and one recommended."""
    out, _ = start("advise", "llama", "--degrees", "1,2,4", "--gpus", "8")
    rows = [line.split()[0] for line in out.splitlines() if line.startswith("   ")]
    assert rows == ["1", "2", "4"]
    assert "best of 8: TP 1 " in out
    assert "recommended: tensor parallel degree 1" in out


def test_dump(folder: Path) -> None:
    """A factory's model after one pass, in a file."""
    start("dump", "factories:make", "--tp", "2", "--stage", "insert_collectives", "-o", "out.txt")
    text = (folder / "out.txt").read_text()
    assert "= all_reduce(%" in text
    assert text.startswith("up.weight : f32[up.ffn, 64] S(up.ffn) = parameter")


def test_calibrate(folder: Path) -> None:
    """The profile that is written can be planned for."""
    out, _ = start("calibrate", "--ranks", "1", "--name", "here", "-o", "here.json")
    assert out.startswith("here, measured on 1 rank\nmatmuls, TFLOP/s")
    assert tpcompile.explain(
        torch.nn.Linear(4, 4), torch.zeros(2, 4), tp=1, hardware=folder / "here.json"
    ).hardware.name == "here"  # fmt: skip


@pytest.mark.slow
def test_export_and_lint_agree(folder: Path) -> None:
    """What is exported for transformers is linted without a finding."""
    out, _ = start("export", "llama", "--tp", "2", "--json")
    found = json.loads(out)
    assert found["plan"]["model.layers.*.mlp.down_proj"] == "rowwise"
    assert list(found["gathered"]) == ["lm_head"]
    (folder / "tp_plan.json").write_text(json.dumps(found["plan"]))
    out, _ = start("lint", "llama", "--tp", "2", "--plan", "tp_plan.json")
    assert out.startswith("nothing to say\n")


def test_lint_fails_on_errors(folder: Path, capsys: pytest.CaptureFixture) -> None:
    """Two key heads on four ranks: exit code 1, and the reason."""
    out, _ = said(capsys, "lint", "llama", "--tp", "4", code=1)
    assert "2 of model.layers.*.self_attn.kv_heads cannot be dealt to 4 ranks" in out


def test_export_for_torch(folder: Path, capsys: pytest.CaptureFixture) -> None:
    """The constructor of every style."""
    out, _ = said(capsys, "export", "factories:make", "--tp", "2", "--to", "torch")
    assert out.splitlines() == [
        "up    ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(dim=-1))",
        "down  RowwiseParallel(input_layouts=Shard(dim=-1), output_layouts=Replicate())",
    ]


def test_why_and_json(folder: Path, capsys: pytest.CaptureFixture) -> None:
    """Reasons instead of tables; JSON to stdout and to a file."""
    out, _ = said(capsys, "explain", "factories:make", "--tp", "2", "--why", "up.weight")
    assert "up.weight" in out.splitlines()[0]
    assert "certificate" not in out
    out, _ = said(capsys, "explain", "factories:make", "--tp", "2", "--json")
    assert json.loads(out)["parameters"]["up.weight"]["placement"] == "Shard(0)"
    said(capsys, "advise", "factories:make", "--degrees", "1,2", "--json", "advice.json")
    assert json.loads((folder / "advice.json").read_text())


def test_pins(folder: Path, capsys: pytest.CaptureFixture) -> None:
    """--plan takes placements by name, and a saved plan."""
    (folder / "pins.json").write_text('{"up.weight": "Replicate"}')
    words = ("explain", "factories:make", "--tp", "2")
    said(capsys, *words, "--plan", "pins.json", "--save-plan", "plan.json")
    again, _ = said(capsys, *words, "--plan", "plan.json", "--json")
    assert json.loads(again)["parameters"]["up.weight"]["placement"] == "Replicate"


def test_stages_and_differences(folder: Path, capsys: pytest.CaptureFixture) -> None:
    """Two passes compared, one block drawn, all stages in a folder."""
    words = ("dump", "factories:make", "--tp", "2")
    out, _ = said(capsys, *words, "--diff", "normalize", "insert_collectives")
    assert any(line.startswith("+") and "all_reduce" in line for line in out.splitlines())
    out, _ = said(capsys, *words, "--form", "dot")
    assert out.startswith("digraph")
    said(capsys, *words, "--stages", "all")
    assert len(list((folder / "all").glob("*.txt"))) > 8


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ("explain", "gone", "--tp", "2"),
            "error: the model 'gone'\n"
            "  no config.json or folder with one has that path, and nothing is downloaded\n"
            "  fix: pass such a path, or package.module:factory\n",
        ),
        (
            ("explain", "factories:gone", "--tp", "2"),
            "error: the model 'factories:gone'\n"
            "  module 'factories' has no attribute 'gone'\n"
            "  fix: pass package.module:factory, importable from here\n",
        ),
        (
            ("explain", "factories:number", "--tp", "2"),
            "error: the model 'factories:number'\n"
            "  number() returns int\n"
            "  fix: return a torch.nn.Module, or (module, example_inputs)\n",
        ),
        (
            ("explain", "llama", "--tp", "2", "--set", "layers=1"),
            "error: --set layers=1\n"
            "  config.json has no 'layers'\n"
            "  fix: its numbers are hidden_size, intermediate_size, max_position_embeddings, "
            "num_attention_heads, num_hidden_layers, num_key_value_heads, vocab_size\n",
        ),
        (
            ("explain", "llama", "--tp", "2", "--set", "hidden_size=30"),
            "error: the model 'llama'\n"
            "  transformers makes no model of config.json: The hidden size (30) is not a multiple "
            "of the number of attention heads (4).\n"
            "  fix: pass a config as save_pretrained writes it, of values that go together\n",
        ),
        (
            ("explain", "llama", "--tp", "2", "--dtype", "int8"),
            "error: --dtype int8\n"
            "  it is no floating-point dtype\n"
            "  fix: use float32, bfloat16 or float16\n",
        ),
        (
            ("explain", "llama", "--tp", "2", "--seq", "64"),
            "error: 64 tokens for LlamaForCausalLM.\n"
            "  it has 32 positions.\n"
            "  fix: ask for fewer tokens, or change the config\n",
        ),
        (
            ("lint", "factories:make", "--tp", "2"),
            "error: lint the tp_plan of MLP\n"
            "  transformers ships none for it\n"
            "  fix: pass --plan FILE, or make one with tpcompile export\n",
        ),
        (
            ("explain", "factories:make", "--tp", "2", "--plan", "factories.py"),
            "error: the plan 'factories.py'\n"
            "  Expecting value: line 2 column 1 (char 1)\n"
            "  fix: pass a JSON file\n",
        ),
    ],
)
def test_errors(
    folder: Path, capsys: pytest.CaptureFixture, words: tuple[str, ...], text: str
) -> None:
    """What was asked, what was found and how to fix it; exit code 1 and no traceback."""
    out, err = said(capsys, *words, code=1)
    assert out == ""
    assert err == text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "tpcompile: error: the following arguments are required: verb\n"),
        (
            ("explain", "llama"),
            "tpcompile explain: error: the following arguments are required: --tp\n",
        ),
        (
            ("explain", "llama", "--tp", "0"),
            "tpcompile explain: error: argument --tp: '0' is not a number from 1 on\n",
        ),
    ],
)
def test_wrong_command_lines(
    capsys: pytest.CaptureFixture, words: tuple[str, ...], text: str
) -> None:
    """Usage on stderr, exit code 2."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(text)


def test_too_large_for_verify(folder: Path, capsys: pytest.CaptureFixture) -> None:
    """Weights are not made where there is no room; the error gives the sizes."""
    words = ("verify", "llama", "--tp", "2", "--set", "vocab_size=100000000000")
    _, err = said(capsys, *words, code=1)
    assert err.startswith("error: the model 'llama' with weights\n  6400.0e9 parameters need ")


def test_verify_fails_when_wrong(
    folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report that is not ok gives exit code 1."""
    wrong = Difference("output", "0", 1.0, ok=False)
    report = tpcompile.Report(2, (wrong,), 1e-4, plan=None)  # type: ignore[arg-type]
    monkeypatch.setattr(tpcompile, "verify", lambda *_, **__: report)
    out, _ = said(capsys, "verify", "factories:make", "--tp", "2", code=1)
    assert "NOT equal to one device" in out


def test_progress_is_told_on_stderr(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing for what is quick; a line with the time for what is not."""
    with progress("quick"):
        pass
    monkeypatch.setattr("tpcompile.progress.FIRST", 0.01)
    with progress("slow"):
        time.sleep(0.3)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "slow ... 0 s\n"
