"""The examples, run as their docstrings say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str) -> str:
    """What an example prints; it must exit with 0."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_quickstart() -> None:
    """Both loss curves are printed and fall alike, and the plan names the model's parameters."""
    text = run("01_quickstart.py")
    assert "model.layers.*.self_attn.q_proj.weight" in text
    rows = re.findall(r"^ *\d+ +(\d+\.\d+) +(\d+\.\d+) +\S+$", text, re.MULTILINE)
    assert len(rows) == 7
    assert all(abs(float(single) - float(sharded)) < 1e-5 for single, sharded in rows)
    assert float(rows[-1][1]) < 0.7 * float(rows[0][1])
    assert text.splitlines()[-1] == "OK: the same within 1e-04 after 30 steps"


def test_your_own_module() -> None:
    """The report is printed, and it says that the model shards right."""
    assert run("02_your_own_module.py").strip()


@pytest.mark.slow
def test_choose_a_degree() -> None:
    """Four blocks fit one A100, so the advice is data parallelism; 16 is said to cross the node."""
    text = run("04_choose_a_degree.py")
    assert "recommended: tensor parallel degree 1" in text
    assert "warning: degrees 16 cross the node of 8 devices" in text


def test_inspect() -> None:
    """Totals, the reason of one weight and the four collectives of a block, without weights."""
    text = run("03_inspect.py")
    assert text.startswith("8 ranks of h100-nvlink, 8,030,261,248 parameters in 32 blocks\n")
    assert "\nmodel.layers.0.self_attn.o_proj.weight: S(layers.0.kv_heads)\n" in text
    assert len(re.findall(r"^  %(?:all_gather|reduce_scatter)_\d+ : bf16", text, re.MULTILINE)) == 4
    assert text.splitlines()[-1].startswith("OK: ")


@pytest.mark.slow
def test_generate() -> None:
    """Text is streamed, and 64 greedy tokens are those of one device."""
    text = run("07_generate.py")
    assert text.startswith("The lock ")
    assert "keys of a layer on this rank: [1, 2, 9, 16]" in text
    assert text.splitlines()[-1] == "OK: 64 greedy tokens are those of one device"
