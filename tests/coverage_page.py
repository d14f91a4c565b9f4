"""The coverage page: every architecture at every degree, compared with one device.

python tests/coverage_page.py [name ...]   prints the named rows; without names, writes the page
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import logging
import re
import sys
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from architectures import ARCHITECTURES
from plans import TINY
from tabulate import tabulate

from tpcompile import pipeline
from tpcompile.clone import clone
from tpcompile.errors import TpcompileError
from tpcompile.hardware import Link
from tpcompile.plan import Plan
from tpcompile.planning import block_paths, captured
from tpcompile.verification import compare

DEGREES = (2, 3, 4, 8)
MACHINE = replace(TINY, inside=Link(1e8, 0.0, startup=2e-5))
"""On it small models are planned as large ones are on GPUs."""
PAGE = Path(__file__).parents[1] / "docs" / "coverage.md"
HEAD = """\
# Coverage

Architectures of transformers {version}, small and with random weights, in float64. Each was run on
2, 3, 4 and 8 ranks, without and with sequence parallelism; outputs, loss and every gradient were
compared with those of one device. `make coverage` makes this page.

Weights are those of linears and experts, and other matrices, at degree 4: column, row and
vocabulary parallel, or replicated. Collectives are those of one block's forward pass, without and
with sequence parallelism: all_reduce (AR), all_gather (AG), reduce_scatter (RS), all_to_all (A2A).
`error` is the largest difference of any tensor over its largest element (of gradients: of any
gradient). Models that compute norms or angles in float32 whatever their type differ by its
rounding; those match within 1e-4, the others within 1e-9.

"""
SHORT = {
    "all_reduce": "AR", "all_gather": "AG", "reduce_scatter": "RS", "all_to_all": "A2A"
}  # fmt: skip


@dataclass
class Row:
    """What was found of one architecture."""

    name: str
    model: str
    styles: Counter[str] = field(default_factory=Counter)
    collectives: dict[bool, str] = field(default_factory=dict)
    """Sequence parallel -> those of one block."""
    error: float = 0.0
    wrong: list[str] = field(default_factory=list)
    """Where it differs from one device, or what it raised."""
    replicated: dict[str, list[int]] = field(default_factory=dict)
    """Weight, block numbers left out -> degrees at which it is replicated."""
    refused: str = ""


def row_for(name: str) -> Row:
    """Capture once, then plan and run at every degree."""
    architecture = ARCHITECTURES[name]
    model, inputs = architecture.build()
    row = Row(name, architecture.model)
    try:
        program = captured(model, (), inputs)
    except TpcompileError as error:
        row.refused = str(error).splitlines()[1].strip()
        return row
    blocks = block_paths(model)
    for tp in DEGREES:
        for parallel in (False, True):
            try:
                planned = clone(program)
                pipeline.plan(planned, tp, sequence_parallel=parallel, hardware=MACHINE)
                report = compare(planned, model, (), inputs, tp=tp)
            except Exception as error:
                row.wrong.append(f"{tp}{' SP' * parallel}: {type(error).__name__}: {error}")
                continue
            row.error = max(row.error, report.worst.error)
            if not report.ok:
                worst = report.worst
                row.wrong.append(
                    f"{tp}{' SP' * parallel}: {worst.kind} {worst.name} {worst.error:.1e}"
                )
            _add(row, report.plan, tp, parallel, blocks, _linears(model))
    return row


def _linears(model: torch.nn.Module) -> set[str]:
    """Weights of linears and of experts: matrices that are no tables and no kernels."""
    tables = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding)
        or "Conv" in type(module).__name__.replace("Conv1D", "")
        for name, _ in module.named_parameters(recurse=False)
    }
    return {n for n, p in model.named_parameters() if p.ndim in (2, 3) and n not in tables}


def _add(
    row: Row, plan: Plan, tp: int, parallel: bool, blocks: set[str], linears: set[str]
) -> None:
    if not parallel:
        for p in plan.parameters:
            if p.name in linears and p.style == "replicated":
                degrees = row.replicated.setdefault(re.sub(r"(^|\.)\d+(?=\.)", r"\1*", p.name), [])
                if tp not in degrees:
                    degrees.append(tp)
    if tp != 4:
        return
    if not parallel:
        row.styles = Counter(p.style for p in plan.parameters if p.name in linears)
    inside = Counter(
        SHORT[c.forward]
        for c in plan.collectives
        if c.forward and any(c.path == b or c.path.startswith(b + ".") for b in blocks)
    )
    shown = [f"{n / len(blocks):.3g} {kind}" for kind, n in sorted(inside.items())]
    row.collectives[parallel] = " + ".join(shown) or "none"


def page(rows: list[Row]) -> str:
    """The whole page."""
    import transformers

    headers = [
        *("architecture", "model", "column", "row", "vocab", "replicated"),
        *("a block", "a block, SP", "error", "matches"),
    ]
    table = [
        [
            row.name, row.model,
            *(row.styles[s] + (row.styles["split"] if s == "column" else 0)
              for s in ("column", "row", "vocab", "replicated")),
            row.collectives.get(False, ""), row.collectives.get(True, ""), f"{row.error:.0e}",
            "no" if row.wrong else "yes",
        ]
        for row in rows if not row.refused
    ]  # fmt: skip
    text = HEAD.format(version=transformers.__version__)
    text += tabulate(table, headers, tablefmt="github") + "\n"
    kept = [
        [row.name, name, ", ".join(map(str, degrees))]
        for row in rows
        for name, degrees in row.replicated.items()
    ]
    text += "\n## Weights that stay replicated\n\n"
    text += tabulate(kept, ["architecture", "weight", "at degrees"], tablefmt="github") + "\n"
    odd = [
        [row.name, each] for row in rows for each in ([row.refused] if row.refused else row.wrong)
    ]
    if odd:
        text += "\n## Refused, or different\n\n" + tabulate(odd, tablefmt="github") + "\n"
    return text


def _quiet() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable()


def main(names: list[str]) -> None:
    """Rows of all processes, in the order of the list."""
    rows = []
    with ProcessPoolExecutor(max_workers=os.cpu_count(), initializer=_quiet) as pool:
        for row in pool.map(row_for, names or list(ARCHITECTURES)):
            rows.append(row)
            print(
                f"{row.name}: {row.refused or row.wrong or 'matches'}", file=sys.stderr, flush=True
            )
    if names:
        print(page(rows))
    else:
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
