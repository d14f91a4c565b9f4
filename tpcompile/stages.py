"""`stages` and `dump`: look at a model's program after any pass, in any form."""

import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import nn

from tpcompile import pipeline
from tpcompile.clone import clone
from tpcompile.errors import InputError, TpcompileError
from tpcompile.explain import Explanation
from tpcompile.forms import FORMS, form_of
from tpcompile.hardware import Hardware
from tpcompile.pins import PlanLike, plan_options
from tpcompile.pipeline import OwnPasses
from tpcompile.planning import Inputs, arguments_of, captured, check_rules
from tpcompile.profiles import hardware_for
from tpcompile.program import Program


class Stages(Mapping[str, str]):
    """The text of a program after every pass, by the pass's name, in order.

    `planned` is the program that all ranks share, `local` the one that one of them runs.
    """

    def __init__(self, planned: Program, local: Program) -> None:
        self.planned, self.local = planned, local
        self._texts = {stage.name: stage.dump for stage in local.extra["stages"]}

    def __getitem__(self, name: str) -> str:
        if name not in self._texts:
            raise InputError(
                f"the stage {name!r}",
                "no pass has that name",
                f"the stages are {', '.join(self._texts)}",
            )
        return self._texts[name]

    def __contains__(self, name: object) -> bool:
        return name in self._texts

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def diff(self, before: str, after: str, *, context: int = 0) -> str:
        """Unified diff of two stages; values keep their names, so a line is a value."""
        a, b = self[before].splitlines(), self[after].splitlines()
        return "\n".join(difflib.unified_diff(a, b, before, after, lineterm="", n=context)) + "\n"

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write `03_name_dims.txt` and so on, and the planned program in every form."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        for number, (name, text) in enumerate(self.items()):
            (place / f"{number:02}_{name}.txt").write_text(text)
        for form in FORMS:
            if form != "text":
                (place / f"planned.{form}").write_text(form_of(self.planned, form))


def stages(
    model: nn.Module,
    example_inputs: Inputs = None,
    *,
    tp: int,
    rank: int = 0,
    hardware: str | os.PathLike[str] | Hardware = "h100-nvlink",
    sequence_parallel: bool | str = "auto",
    outputs: str = "replicated",
    plan: PlanLike = None,
    passes: OwnPasses | None = None,
) -> Stages:
    """Every stage of what `shard` would do to `model` on rank `rank` of `tp`.

    Needs no process group and no weights, and does not change the model.  Arguments as for
    `tpcompile.explain`.

    Raises:
        TpcompileError: As `shard` would.
    """
    if not 0 <= rank < tp:
        raise InputError(f"stages(tp={tp}, rank={rank})", f"ranks are 0 to {tp - 1}", "pass one")
    args, kwargs = arguments_of(model, example_inputs)
    options = plan_options(model, plan, sequence_parallel, outputs, hardware_for(hardware))
    program = captured(model, args, kwargs, passes=passes, dumps=True)
    pipeline.plan(program, tp, dumps=True, caches={}, **options)
    check_rules(program, strict=False)
    local = clone(program)
    pipeline.local(local, ("tp", tp, rank), dumps=True)
    pipeline.run(local, pipeline.EMIT, dumps=True)
    return Stages(program, local)


Source = Stages | Explanation | Program | nn.Module
"""What there is a program of."""


def dump(
    source: Source,
    form: str = "text",
    *,
    block: str = "",
    file: str | os.PathLike[str] | None = None,
) -> str:
    """The planned program of `source` in one form.

    Args:
        source: A sharded model, or what `stages` or `explain` returns.
        form: "text", "dot" (Graphviz), "svg", "html" or "json".
        block: Path of one block, such as "model.layers.0", to see it alone.
        file: Where to write it, too.

    Raises:
        TpcompileError: There is no such form, block, or no plan of the model.
    """
    if form not in FORMS:
        raise InputError(f"dump in the form {form!r}", "it is not one", f"use {', '.join(FORMS)}")
    program = program_of(source)
    if block:
        _check_block(program, block)
    text = form_of(program, form, block)
    if file is not None:
        Path(file).write_text(text)
    return text


def program_of(source: Source) -> Program:
    """The planned program of what `dump` takes."""
    if isinstance(source, Program):
        return source
    if isinstance(source, Stages):
        return source.planned
    if isinstance(source, Explanation):
        return source.program
    explain = source.__dict__.get("explain")
    if explain is None:
        raise TpcompileError(
            f"dump of {type(source).__name__}",
            "the model has no plan",
            "shard it first, or dump(tpcompile.explain(model, inputs, tp=...))",
        )
    return explain().program


def _check_block(program: Program, block: str) -> None:
    known = dict.fromkeys(node.meta.get("block", "") for node in program.calls())
    known.pop("", None)
    if block not in known:
        raise InputError(
            f"dump of the block {block!r}",
            "no block of the program has that path",
            f"the blocks are {', '.join(known)}" if known else "the model has no repeated blocks",
        )
