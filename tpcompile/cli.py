"""The command line: `tpcompile VERB ...`, see `tpcompile --help`."""

import json
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tpcompile.cli_parser import parser
from tpcompile.errors import InputError, TpcompileError
from tpcompile.progress import progress


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0, 1 for what is wrong, 2 for a wrong command line."""
    arguments = parser().parse_args(argv)
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        code = _VERBS[arguments.verb](arguments)
        sys.stdout.flush()
        return code
    except TpcompileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the reader, such as head, has had enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _explain(given: Namespace) -> int:
    import tpcompile

    model, inputs = _model(given)
    with progress(f"planning {type(model).__name__} on {given.tp} ranks"):
        found = tpcompile.explain(
            model, inputs, tp=given.tp, hardware=given.hardware, plan=_pins(given.plan),
            sequence_parallel=_switch(given), optimizer=given.optimizer, strict=given.strict,
        )  # fmt: skip
        text = "" if given.json or given.why else str(found)
    for form in ("html", "svg"):
        if path := getattr(given, form):
            with progress(f"drawing {path}"):
                tpcompile.dump(found, form, file=path)
    if given.save_plan:
        found.plan.save(given.save_plan)
    for name in given.why:
        with progress(f"solving again for the alternatives of {name}"):
            print(found.why(name))
    if given.json:
        _write_json(found.to_json(), given.json)
    elif text:
        print(text)
    return 0


def _advise(given: Namespace) -> int:
    import tpcompile

    model, inputs = _model(given)
    options: dict[str, Any] = {"degrees": given.degrees} if given.degrees else {}
    with progress(f"planning {type(model).__name__} at every degree"):
        advice = tpcompile.advise(
            model, inputs, hardware=given.hardware, gpus=given.gpus, optimizer=given.optimizer,
            memory=given.memory and given.memory * 1e9, global_batch=given.global_batch, **options,
        )  # fmt: skip
    if given.plot:
        advice.plot(given.plot)
    if given.json:
        _write_json(advice.to_json(), given.json)
    else:
        print(advice)
    return 0


def _verify(given: Namespace) -> int:
    import torch

    import tpcompile

    torch.manual_seed(given.seed)
    model, inputs = _model(given, weights=True)
    with progress(f"running {type(model).__name__} on 1 and on {given.tp} ranks"):
        report = tpcompile.verify(
            model, inputs, tp=given.tp, sequence_parallel=_switch(given), plan=_pins(given.plan),
            seed=given.seed, strict=given.strict,
        )  # fmt: skip
    print(report)
    return 0 if report.ok else 1


def _dump(given: Namespace) -> int:
    import tpcompile

    model, inputs = _model(given)
    with progress(f"planning {type(model).__name__} on {given.tp} ranks"):
        found = tpcompile.stages(
            model, inputs, tp=given.tp, rank=given.rank, hardware=given.hardware,
            sequence_parallel=_switch(given), plan=_pins(given.plan),
        )  # fmt: skip
    if given.stages:
        found.save(given.stages)
        return 0
    if given.stage:
        text = found[given.stage]
    elif given.diff:
        text = found.diff(*given.diff)
    else:
        text = tpcompile.dump(found, given.form, block=given.block)
    _write(text, given.output or "-")
    return 0


def _export(given: Namespace) -> int:
    import tpcompile
    from tpcompile.exchange import to_hf_tp_plan, to_parallelize_plan

    model, inputs = _model(given)
    with progress(f"planning {type(model).__name__} on {given.tp} ranks"):
        plan = tpcompile.explain(
            model, inputs, tp=given.tp, hardware=given.hardware, plan=_pins(given.plan),
            sequence_parallel=_switch(given),
        ).plan  # fmt: skip
    export = to_hf_tp_plan if given.to == "hf" else to_parallelize_plan
    with progress("checking what module styles can say of it"):
        found = export(plan, model, inputs)
    if given.json:
        _write_json(found.to_json(), given.json)
    else:
        print(found)
    return 0


def _lint(given: Namespace) -> int:
    from tpcompile.lint import lint

    model, inputs = _model(given)
    styles = _read_json(given.plan) if given.plan else dict(getattr(model, "tp_plan", None) or {})
    if not styles:
        raise InputError(
            f"lint the tp_plan of {type(model).__name__}",
            "transformers ships none for it",
            "pass --plan FILE, or make one with tpcompile export",
        )
    with progress(f"following {type(model).__name__} on {given.tp} ranks"):
        report = lint(styles, model, inputs, tp=given.tp, hardware=given.hardware)
    if given.json:
        _write_json(report.to_json(), given.json)
    else:
        print(report)
    return 0 if report.ok else 1


def _calibrate(given: Namespace) -> int:
    from tabulate import tabulate

    import tpcompile

    with progress(f"measuring this machine with {given.ranks} processes"):
        profile = tpcompile.calibrate(ranks=given.ranks, path=given.output, name=given.name)
    rates = ", ".join(f"{str(k)[6:]} {v / 1e12:.3g}" for k, v in profile.flops.items())
    rows = [
        ("matmuls, TFLOP/s", rates),
        ("of it, by smallest dim", ", ".join(f"{n}: {part:.0%}" for n, part in profile.efficiency)),
        ("memory", f"{profile.memory / 1e9:.0f} GB at {profile.memory_bandwidth / 1e9:.3g} GB/s"),
        ("an op at least", f"{profile.launch * 1e6:.1f} us"),
    ]
    if given.ranks > 1:
        link = profile.inside
        rows.append(("link", f"{link.bandwidth / 1e9:.3g} GB/s"))
        rows.append(("a collective at least", f"{(link.startup + link.latency) * 1e6:.0f} us"))
    print(f"{profile.name}, {profile.source}\n{tabulate(rows, tablefmt='plain')}")
    return 0


_VERBS: dict[str, Callable[[Namespace], int]] = {
    "explain": _explain,
    "advise": _advise,
    "verify": _verify,
    "dump": _dump,
    "export": _export,
    "lint": _lint,
    "calibrate": _calibrate,
}


def _model(given: Namespace, *, weights: bool = False) -> tuple[Any, Any]:
    """The model and its inputs; a small batch of few tokens where weights are made."""
    from tpcompile.model_source import Wanted, load_model

    batch = given.batch or (2 if weights else 1)
    wanted = Wanted(given.model, batch, given.seq, given.dtype, tuple(given.changes), weights)
    with progress(f"loading {given.model}"):
        return load_model(wanted)


def _switch(given: Namespace) -> bool | str:
    asked: str = given.sequence_parallel
    return {"on": True, "off": False}.get(asked, asked)


def _pins(path: str | None) -> Any:
    """A saved plan's file as it is, placements by name read from JSON."""
    if path is None:
        return None
    fields = _read_json(path)
    return path if isinstance(fields.get("parameters"), dict) else fields


def _read_json(path: str) -> dict[str, Any]:
    try:
        fields = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"the plan {path!r}", str(error), "pass a JSON file") from error
    if not isinstance(fields, dict):
        raise InputError(f"the plan {path!r}", "it is not a JSON object", "give placements by name")
    return fields


def _write_json(value: Any, path: str) -> None:
    text = value if isinstance(value, str) else json.dumps(value, indent=2, default=str)
    _write(text, path)


def _write(text: str, path: str) -> None:
    text = text.rstrip("\n") + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text)
