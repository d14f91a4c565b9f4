"""Plans of other tools: Hugging Face's `tp_plan` and torch's `parallelize_module`, out and in.

Both give styles to modules and change no code, so they can say less than a plan of tpcompile.  An
exported plan is followed through the model's graph, and run on one rank's sizes, before it is
returned: what would be wrong is gathered or left whole, and listed with the reason.
"""

import fnmatch
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tpcompile.errors import ShardingError
from tpcompile.module_styles import GRADIENT, STYLES, folded
from tpcompile.plan import Plan
from tpcompile.planning import Inputs
from tpcompile.settle_styles import Search, StyledModel, settle


class ForeignPlan(dict[str, Any]):
    """An exported plan: a plain dict of styles by module name, and what it could not say.

    `print(plan)` shows both.
    """

    left_whole: dict[str, str]
    """Parameters that tpcompile shards and this plan does not -> why."""
    gathered: dict[str, str]
    """Modules that hand out or take whole values although tpcompile passes on parts -> why."""
    tied: dict[str, str]
    """Parameter of a styled module -> the other name of the same parameter."""
    written: dict[str, str]
    """Styled module whose output the model changes in place, which autograd refuses -> where."""

    def __init__(self, styles: Mapping[str, Any]) -> None:
        super().__init__(styles)
        self.left_whole, self.gathered, self.tied, self.written = {}, {}, {}, {}

    def to_json(self) -> dict[str, Any]:
        """The styles under "plan", and everything else."""
        styles = {name: style_text(style) for name, style in self.items()}
        return {"plan": styles, **vars(self)}

    def __str__(self) -> str:
        width = max(map(len, self), default=0)
        lines = [f"{name:{width}}  {style_text(style)}" for name, style in self.items()]
        lines += [f"left whole: {name}: {why}" for name, why in self.left_whole.items()]
        lines += [f"gathered: {name}: {why}" for name, why in self.gathered.items()]
        lines += [f"tied: {a} to {b}" for a, b in self.tied.items()]
        refused = "not for training: autograd refuses that the output is changed in place"
        return "\n".join(lines + [f"{refused}: {a} ({b})" for a, b in self.written.items()])


def style_text(style: Any) -> str:
    """The style as it is written in a plan."""
    if isinstance(style, str):
        return style
    shown = [
        f"{name}={value[0]!r}"
        for name, value in vars(style).items()
        if name in ("input_layouts", "output_layouts")
    ]
    if hasattr(style, "sequence_sharding"):
        shown = [f"sequence_dim={style.sequence_sharding[0].dim}", "use_local_output=True"]
    return f"{type(style).__name__}({', '.join(shown)})"


def to_hf_tp_plan(plan: Any, model: nn.Module, example_inputs: Inputs = None) -> ForeignPlan:
    """The plan as Hugging Face's `DistributedConfig(tp_plan=...)` takes it.

    Args:
        plan: A `Plan`, or what has one: `explain(...)`, a model that `shard` returned.
        model: The unsharded model, which may be on the meta device.
        example_inputs: As `shard` takes them; the plan is checked on them.

    Returns:
        Styles by module name, layer numbers as `*`.  Modules that no style fits are left whole.
    """
    given, read = _plan_of(plan), StyledModel.of(model, example_inputs)
    search = settle(given, read, packed=True)
    styles = {folded(name): style for name, style in search.styles.items()}
    return _foreign(styles, search, read)


def to_parallelize_plan(plan: Any, model: nn.Module, example_inputs: Inputs = None) -> ForeignPlan:
    """The plan as `torch.distributed.tensor.parallel.parallelize_module` takes it.

    Arguments as of `to_hf_tp_plan`.  `parallelize_module` unties tied weights: `tie_again` mends
    that.
    """
    given, read = _plan_of(plan), StyledModel.of(model, example_inputs)
    search = settle(given, read, packed=False)
    dims = search.flow.gradients
    styles = {
        folded(name): _torch_style(style, dims.get(name)) for name, style in search.styles.items()
    }
    return _foreign(styles, search, read)


def tie_again(model: nn.Module, plan: ForeignPlan) -> nn.Module:
    """Make one parameter again of the tied ones that `parallelize_module(model, ..., plan)` untied.

    Returns:
        The model, changed in place.
    """
    for names in plan.tied.items():
        owners = [model.get_submodule(name.rpartition(".")[0]) for name in names]
        shorts = [name.rpartition(".")[2] for name in names]
        both = [getattr(owner, short) for owner, short in zip(owners, shorts, strict=True)]
        kept = next((p for p in both if isinstance(p, DTensor)), both[0])
        for owner, short in zip(owners, shorts, strict=True):
            setattr(owner, short, kept)
    return model


def from_hf_tp_plan(
    tp_plan: Mapping[str, str], model: nn.Module, *, exact: bool = False
) -> dict[str, Placement]:
    """Pins for `shard(..., plan=)` and `explain(..., plan=)` from a `tp_plan`.

    Args:
        tp_plan: Styles by module name, as in `model.tp_plan`.
        model: The model it is for.
        exact: Pin what the plan does not name to `Replicate()`; else it is solved for.

    Raises:
        ShardingError: A style is not known here.
    """
    return _pins(full_names(tp_plan, model), model, exact)


def from_parallelize_plan(
    plan: Mapping[str, Any], model: nn.Module, *, exact: bool = False
) -> dict[str, Placement]:
    """Pins from a plan for `parallelize_module`; see `from_hf_tp_plan`."""
    return _pins(hf_styles(plan, model), model, exact)


def _pins(styles: Mapping[str, str], model: nn.Module, exact: bool) -> dict[str, Placement]:
    pins = {p: placement for n, s in styles.items() for p, placement in _placements(model, n, s)}
    rest = (name for name, _ in model.named_parameters() if exact and name not in pins)
    return pins | dict.fromkeys(rest, Replicate())


def full_names(tp_plan: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Styles by full module name, `*` opened as transformers opens it."""
    modules = (name for name, _ in model.named_modules() if name)
    return {name: tp_plan[folded(name)] for name in modules if folded(name) in tp_plan}


def hf_styles(plan: Mapping[str, Any], model: nn.Module) -> dict[str, str]:
    """Hugging Face's words, by full module name, for the styles of a `parallelize_module` plan.

    Raises:
        ShardingError: A style has no such word.
    """
    found = {}
    for name, module in model.named_modules():
        for pattern, style in plan.items():
            parts, wanted = name.split("."), pattern.split(".")
            if len(parts) == len(wanted) and all(map(fnmatch.fnmatch, parts, wanted)):
                found[name] = _hf_style(name, module, style)
    return found


def _plan_of(plan: Any) -> Plan:
    found = plan if isinstance(plan, Plan) else getattr(plan, "plan", None)
    if isinstance(found, Plan):
        return found
    raise ShardingError(
        f"export a plan from {type(plan).__name__}.",
        "it is no Plan and has none.",
        "pass explain(model, ..., tp=8) or model.plan of a sharded model",
    )


def _foreign(styles: dict[str, Any], search: Search, read: StyledModel) -> ForeignPlan:
    found = ForeignPlan(styles)
    found.left_whole = {folded(name): why for name, why in search.left.items()}
    found.gathered = {folded(name): why for name, why in search.gathered.items()}
    found.written = {folded(n): why for n, why in read.written.items() if n in search.styles}
    for name, first in read.names.items():
        if name != first and {name.rpartition(".")[0], first.rpartition(".")[0]} & {*search.styles}:
            found.tied[name] = first
    return found


def _torch_style(style: str, part: int | None) -> Any:
    """What torch calls one of Hugging Face's words; `part`: the split dim of a norm's input."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
    )

    if style == GRADIENT:
        # Named after its usual use: replicated weights, input split on any dim, summed gradients.
        return SequenceParallel(sequence_dim=part or 0, use_local_output=True)
    made = {
        "colwise": lambda: ColwiseParallel(),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "rowwise": lambda: RowwiseParallel(),
        "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    }
    return made[style]()


def _hf_style(name: str, module: nn.Module, style: Any) -> str:
    """Hugging Face's word for one of torch's objects."""
    kind, table = type(style).__name__, isinstance(module, nn.Embedding)
    ins, outs = getattr(style, "input_layouts", ()), getattr(style, "output_layouts", ())
    whole = (Replicate(),)
    if kind == "ColwiseParallel" and ins == whole:
        if outs == whole:
            return "embedding_colwise" if table else "colwise_gather_output"
        if outs == (Shard(-1),) and not table:
            return "colwise"
    if kind == "RowwiseParallel" and outs == whole:
        if table:
            return "embedding_rowwise"
        return "rowwise" if ins == (Shard(-1),) else "rowwise_split_input"
    if kind == "SequenceParallel":
        return GRADIENT
    raise ShardingError(
        f"read the style of {name} in a parallelize_module plan.",
        f"{style_text(style)} has no counterpart among {', '.join(STYLES)}.",
        "import the plan without this module, and pin its weight by hand",
    )


def _placements(model: nn.Module, name: str, style: str) -> list[tuple[str, Placement]]:
    """(parameter, placement) for the parameters of one styled module."""
    if style not in STYLES:
        raise ShardingError(
            f"read the style {style!r} of {name} in a tp_plan.",
            f"its effect is not known here; known are {', '.join(STYLES)}.",
            "import the plan without this module, and pin its weights by hand",
        )
    dim, found = STYLES[style].dim, []
    for short, parameter in model.get_submodule(name).named_parameters(recurse=False):
        whole = dim is None or (short == "bias" and dim != 0) or parameter.ndim <= dim
        placement = Replicate() if whole else Shard(dim)  # type: ignore[arg-type]
        found.append((f"{name}.{short}", placement))
    return found
