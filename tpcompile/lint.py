"""Read a tensor parallel plan of another tool against the model's graph: what is wrong or lost."""

import difflib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from tabulate import tabulate
from torch import nn

from tpcompile.exchange import full_names, hf_styles
from tpcompile.explain import Explanation, explain
from tpcompile.explain_text import folded_words
from tpcompile.formulas import bytes_text, seconds_text
from tpcompile.hardware import Hardware
from tpcompile.module_styles import GATHERED, STYLES, Conflict, Flow, folded
from tpcompile.plan import Plan
from tpcompile.planning import Inputs
from tpcompile.profiles import hardware_for
from tpcompile.settle_styles import StyledModel, module_style, settle

_ELSEWHERE = (
    "all_reduce", "local_params", "mla_kv_a_proj", "moe_identity_expert", "moe_tp_experts",
    "packed_rowwise", "sequence_parallel",
)  # fmt: skip
"""Words of transformers whose modules are not followed here."""
_LEVELS = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One thing to say about a plan."""

    level: str
    """error: wrong numbers or no run; warning: dearer than need be; note: not judged."""
    name: str
    """Module or parameter, layer numbers as `*`."""
    text: str


@dataclass(frozen=True)
class Price:
    """What a plan costs one rank in a forward and backward pass."""

    weights: int
    """Bytes of parameters."""
    collectives: int
    traffic: int
    """Bytes sent."""
    compute: float
    """Seconds."""
    communication: float


@dataclass(frozen=True)
class LintReport:
    """What `lint` found. `print(report)` shows it."""

    size: int
    hardware: str
    findings: tuple[Finding, ...]
    theirs: Price
    ours: Price

    @property
    def ok(self) -> bool:
        """Whether the plan computes the right thing."""
        return all(finding.level != "error" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers; bytes and seconds."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"{f.level}: {f.name}: {f.text}" for f in self.findings] or ["nothing to say"]
        a, b = self.theirs, self.ours
        rows = [
            ("weights", bytes_text(a.weights), bytes_text(b.weights)),
            ("collectives", a.collectives, b.collectives),
            ("bytes sent", bytes_text(a.traffic), bytes_text(b.traffic)),
            ("compute", seconds_text(a.compute), seconds_text(b.compute)),
            ("communication", seconds_text(a.communication), seconds_text(b.communication)),
        ]
        name = "this plan" if self.ok else "this plan, if it ran"
        head = [f"per rank, tp={self.size}, {self.hardware}", name, "tpcompile"]
        align = ("left", "right", "right")
        return "\n".join([*lines, "", tabulate(rows, head, colalign=align, disable_numparse=True)])


def lint(
    tp_plan: Mapping[str, Any],
    model: nn.Module,
    example_inputs: Inputs = None,
    *,
    tp: int,
    hardware: Hardware | str | os.PathLike[str] = "h100-nvlink",
) -> LintReport:
    """Check a `tp_plan` of Hugging Face or a plan for `parallelize_module`.

    Errors are names that match nothing, styles that do not fit their module, and values that the
    model's code would compute wrongly on a rank's part.  Warnings are weights left whole and values
    gathered although the code runs on parts.  The price of both is compared with tpcompile's plan.
    """
    read, profile = StyledModel.of(model, example_inputs), hardware_for(hardware)
    ours = explain(model, example_inputs, tp=tp, hardware=profile)
    styles, findings = _understood(tp_plan, model, read, tp)
    findings += _merged(read.conflicts(styles, tp))
    findings += _missed(ours.plan, styles, read)
    findings += _needless(ours.plan, styles, read)
    flow = read.follow(styles, tp, profile)
    price = _price_of_styles(flow, styles, model, tp)
    ordered = sorted(findings, key=lambda finding: _LEVELS.index(finding.level))
    return LintReport(tp, profile.name, tuple(ordered), price, _price_of_plan(ours, model))


def _understood(
    tp_plan: Mapping[str, Any], model: nn.Module, read: StyledModel, tp: int
) -> tuple[dict[str, str], list[Finding]]:
    """(the styles that can be followed, by full name; what is wrong with the others)."""
    words = all(isinstance(style, str) for style in tp_plan.values())
    given = full_names(tp_plan, model) if words else hf_styles(tp_plan, model)
    found = _unmatched(tp_plan, model) if words else []
    styles: dict[str, str] = {}
    for name, style in given.items():
        if style in _ELSEWHERE:
            found.append(Finding("note", folded(name), f"{style} is not checked here"))
            continue
        wrong = _misfit(model.get_submodule(name), style)
        if wrong:
            found.append(Finding("error", folded(name), wrong))
        else:
            styles[name] = style
    weighted = {name for name, style in styles.items() if STYLES[style].dim is not None}
    for name in sorted(weighted - read.follow(styles, tp).applied):
        del styles[name]
        found.append(Finding("note", folded(name), "this forward does not run it"))
    return styles, list(dict.fromkeys(found))


def _unmatched(tp_plan: Mapping[str, str], model: nn.Module) -> list[Finding]:
    modules = {folded(name) for name, _ in model.named_modules()}
    parameters = {folded(name) for name, _ in model.named_parameters()}
    found = []
    for name in sorted(tp_plan.keys() - modules):
        if name in parameters:
            found.append(Finding("note", name, "a parameter's own style is not checked here"))
        elif folded(name) in modules:
            text = "matches nothing: layers are named by *, never by number"
            found.append(Finding("error", name, f"{text}; write {folded(name)}"))
        else:
            near = difflib.get_close_matches(name, sorted(modules - {""}), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            text = f"matches no module of {type(model).__name__}{hint}"
            found.append(Finding("error", name, text))
    return found


def _misfit(module: nn.Module, style: str) -> str:
    """Why a style cannot be given to a module, or ""."""
    if style not in STYLES:
        return f"no style is called {style!r}; there are {', '.join((*STYLES, *_ELSEWHERE))}"
    dim = STYLES[style].dim
    if dim is None:
        return ""
    table = style.startswith("embedding")
    fits = module_style(module, "weight", dim)
    if fits not in STYLES or fits.startswith("embedding") != table:
        return f"{style} does not fit a {type(module).__name__}"
    return ""


def _merged(conflicts: list[Conflict]) -> list[Finding]:
    """One finding for the layers that have the same conflict."""
    found: dict[tuple[str, str], None] = {}
    # A row module gets whole values where a module before it cannot hand out parts.
    first = [c for c in conflicts if c.kind == "part"] or conflicts
    for conflict in first:
        names = ", ".join(sorted({folded(module) for module in conflict.modules}))
        where = f" ({conflict.where})" if conflict.where else ""
        found[names, folded_words(conflict.reason) + where] = None
    return [Finding("error", names, text) for names, text in found]


def _missed(plan: Plan, styles: Mapping[str, str], read: StyledModel) -> list[Finding]:
    """Matrices that tpcompile splits and this plan leaves whole on every rank."""
    split = {
        read.names[f"{name}.weight"] for name, s in styles.items() if STYLES[s].dim is not None
    }
    found: dict[str, list[int]] = {}
    sizes = {name: p.element_size() for name, p in read.module.named_parameters()}
    for row in plan.parameters:
        if row.shape != row.local and len(row.shape) > 1 and row.name not in split:
            spare = (prod(row.shape) - prod(row.local)) * sizes[row.name]
            found.setdefault(folded(row.name), []).append(spare)
    return [
        Finding("warning", name, f"left whole: {bytes_text(sum(spare))} more a rank than split")
        for name, spare in found.items()
    ]


def _needless(plan: Plan, styles: Mapping[str, str], read: StyledModel) -> list[Finding]:
    """Gathering styles of modules whose parts the code can work on."""
    best = settle(plan, read, packed=True).styles
    found = {}
    for name, style in styles.items():
        better = best.get(name, style)
        if style in GATHERED.values() and better not in (*GATHERED.values(), style):
            found[folded(name), style, better] = None
    return [
        Finding("warning", name, f"{style} is needless: {better} computes the same")
        for name, style, better in found
    ]


def _price_of_styles(flow: Flow, styles: Mapping[str, str], model: nn.Module, tp: int) -> Price:
    weights = 0
    for name, parameter in model.named_parameters():
        module, _, short = name.rpartition(".")
        style = STYLES[styles[module]] if module in styles else None
        split = (
            style is not None and style.dim is not None and (short == "weight" or style.dim == 0)
        )
        weights += parameter.numel() * parameter.element_size() // (tp if split else 1)
    traffic = sum(_sent(sent.kind, sent.nbytes, tp) for sent in flow.sent)
    return Price(weights, len(flow.sent), int(traffic), flow.compute, flow.communication)


def _price_of_plan(ours: Explanation, model: nn.Module) -> Price:
    plan, times = ours.plan, ours.times
    sizes = {name: p.element_size() for name, p in model.named_parameters()}
    return Price(
        sum(prod(row.local) * sizes[row.name] for row in plan.parameters),
        sum(sent.calls for sent in ours.collectives),
        int(sum(sent.nbytes * sent.calls for sent in ours.collectives)),
        times.compute,
        times.communication,
    )


def _sent(kind: str, nbytes: int, tp: int) -> float:
    """Bytes a rank sends in a ring, for a value of `nbytes` that is whole on one device."""
    moved = nbytes * (tp - 1) / tp
    return {"all_reduce": 2 * moved, "all_to_all": moved / tp}.get(kind, moved)
