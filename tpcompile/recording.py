"""`TPCOMPILE_DUMP=folder`: every stage of every run as files."""

import os
from collections import Counter
from pathlib import Path

import torch.distributed as dist

from tpcompile.program import Program

VARIABLE = "TPCOMPILE_DUMP"
_seen: Counter[str] = Counter()
"""Model class -> how many of its captures have been recorded by this process."""


def is_on() -> bool:
    """Whether the user asks for files."""
    return bool(os.environ.get(VARIABLE))


def write_stage(program: Program, number: int, name: str, text: str) -> None:
    """Write one stage: rank 0 alone, until the program is one rank's own."""
    axis = program.extra.get("axis")
    if axis is not None:
        _write(folder_for(program) / f"rank{axis[2]}" / f"{number:02}_{name}.txt", text)
    elif _rank() == 0:
        _write(folder_for(program) / f"{number:02}_{name}.txt", text)


def write_planned(program: Program) -> None:
    """Write a planned program as DOT, HTML and JSON."""
    from tpcompile.forms import FORMS, form_of

    if _rank() == 0:
        for form in FORMS:
            if form != "text":
                _write(folder_for(program) / f"planned.{form}", form_of(program, form))


def write_disagreement(program: Program, rank: int) -> None:
    """Write what this rank has planned, where ranks have planned different things."""
    if not is_on():
        return
    for number, stage in enumerate(program.extra.get("stages", [])):
        _write(folder_for(program) / f"rank{rank}" / f"{number:02}_{stage.name}.txt", stage.dump)


def folder_for(program: Program) -> Path:
    """The folder of one capture: the model's class, numbered from the second on."""
    if "dump_folder" not in program.extra:
        name = program.extra.get("model", "program")
        _seen[name] += 1
        program.extra["dump_folder"] = name if _seen[name] == 1 else f"{name}-{_seen[name]}"
    return Path(os.environ[VARIABLE]) / program.extra["dump_folder"]


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _write(path: Path, text: str) -> None:
    """Replace the file whole: data parallel replicas write the same one at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f"{path.suffix}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)
