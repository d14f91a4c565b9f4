"""`verify`: run all ranks in this process and compare with the model on one device."""

import copy
import os
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from tpcompile import pipeline
from tpcompile.capture_inputs import bind_inputs
from tpcompile.clone import clone
from tpcompile.collectives import all_gather
from tpcompile.hardware import Hardware
from tpcompile.local_group import run_ranks
from tpcompile.pins import PlanLike, plan_options
from tpcompile.pipeline import OwnPasses
from tpcompile.plan import Plan, plan_of
from tpcompile.planning import Inputs, arguments_of, captured, check_rules
from tpcompile.profiles import hardware_for
from tpcompile.program import Program, values
from tpcompile.storage import ParamLayout
from tpcompile.structure import flatten, is_tensor


@dataclass(frozen=True)
class Difference:
    """One compared tensor."""

    kind: str
    name: str
    error: float
    """Largest absolute difference over the scale of its kind."""
    ok: bool


@dataclass(frozen=True)
class Report:
    """What `verify` found. `print(report)` shows the worst tensors."""

    size: int
    differences: tuple[Difference, ...]
    tolerance: float
    plan: Plan

    @property
    def ok(self) -> bool:
        """Whether everything is equal within the tolerance."""
        return all(d.ok for d in self.differences)

    @property
    def worst(self) -> Difference:
        """The tensor with the largest error."""
        return max(self.differences, key=lambda d: d.error)

    def __str__(self) -> str:
        order = sorted(self.differences, key=lambda d: -d.error)[:8]
        rows = [(d.kind, d.name, f"{d.error:.1e}", "ok" if d.ok else "WRONG") for d in order]
        counts = {
            k: sum(d.kind == k for d in self.differences) for k in ("output", "loss", "gradient")
        }
        head = ", ".join(f"{n} {k}{'es' if k == 'loss' else 's'}" for k, n in counts.items())
        verdict = "equal to one device" if self.ok else "NOT equal to one device"
        table = tabulate(rows, ["", "tensor", "error", f"within {self.tolerance:.0e}"])
        return f"{self.size} ranks, {head}: {verdict}\n{table}"


def verify(
    model: nn.Module,
    example_inputs: Inputs = None,
    *,
    tp: int,
    sequence_parallel: bool | str = "auto",
    plan: PlanLike = None,
    outputs: str = "replicated",
    hardware: Hardware | str | os.PathLike[str] | None = None,
    overlap_chunks: int | str = 1,
    seed: int = 0,
    strict: bool = False,
    passes: OwnPasses | None = None,
) -> Report:
    """Compare the sharded program on `tp` ranks with the model on one device.

    All ranks run in this process on the CPU, through the graphs they would really run and
    collectives that exchange the real tensors; no process group is needed.  Outputs, the loss
    (the output named so, else a weighted mean of the outputs) and every gradient are compared.
    The model is not changed.  `hardware` is what the plan is priced on; `overlap_chunks` and
    `passes`, which are a user's own, are as for `shard`.
    """
    args, kwargs = arguments_of(model, example_inputs)
    profile = hardware_for(hardware, "cuda")
    options = plan_options(model, plan, sequence_parallel, outputs, profile, overlap_chunks)
    program = captured(model, args, kwargs, passes=passes)
    pipeline.plan(program, tp, **options)
    check_rules(program, strict=strict)
    return compare(program, model, args, kwargs, tp=tp, seed=seed)


def compare(
    program: Program,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    tp: int,
    seed: int = 0,
) -> Report:
    """Run the planned program of a call on `tp` ranks here, and compare with the model itself."""
    tensors, structure, names = bind_inputs(model, args, kwargs)
    want = _on_one_device(model, tensors, structure, program, seed)
    torch.manual_seed(seed)
    runs = run_ranks(tp, lambda axis: _on_rank(clone(program), axis, model, tensors))
    found = _differences(want, runs, names)
    layouts = runs[0].layouts
    return Report(tp, tuple(found), _tolerance(program), plan_of(runs[0].program, layouts))


@dataclass
class _Run:
    """What one run produced."""

    outputs: list[Tensor]
    loss: Tensor
    gradients: dict[str, Tensor | None]
    inputs: list[Tensor | None]
    updates: list[Tensor]
    layouts: dict[str, ParamLayout]
    program: Program


def _leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]


def _on_one_device(
    model: nn.Module, tensors: list[Tensor], structure: Any, program: Program, seed: int
) -> _Run:
    whole = copy.deepcopy(model)
    whole.zero_grad(set_to_none=True)
    inputs = _leaves(tensors)
    args, kwargs = structure.unflatten(iter(inputs))
    torch.manual_seed(seed)
    outputs = flatten(whole(*args, **kwargs), is_tensor)[0]
    loss = _scalar(outputs)
    if loss.requires_grad:
        loss.backward()
    gradients = {n: p.grad for n, p in whole.named_parameters()}
    buffers = dict(whole.named_buffers())
    updates = [
        buffers[program.leaves[u].name]
        for u in program.updates
        if program.leaves[u].kind == "buffer"
    ]
    return _Run(outputs, loss, gradients, [t.grad for t in inputs], updates, {}, program)


def _on_rank(program: Program, axis: Any, model: nn.Module, tensors: list[Tensor]) -> _Run:
    pipeline.local(program, axis)
    rank = axis[2]
    layouts: dict[str, ParamLayout] = program.extra["layouts"]
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    local: dict[str, Tensor] = {}
    values_in = []
    inputs = iter(_leaves(tensors))
    given = []
    for node in program.placeholders():
        leaf = program.leaves[node.name]
        if leaf.kind == "parameter":
            whole = parameters[leaf.name]
            part = layouts[leaf.name].to_local(whole.detach(), rank).clone()
            local[leaf.name] = part.requires_grad_(whole.requires_grad)
            layout = layouts[leaf.name]
            cut = (
                part.narrow(layout.dim, 0, layout.real_length(rank))
                if layout.dim is not None
                else part
            )
            values_in.append(cut)
        elif leaf.kind == "buffer":
            values_in.append(buffers[leaf.name].detach().clone())
        elif leaf.kind == "constant":
            values_in.append(leaf.tensor)
        else:
            given.append(next(inputs))
            values_in.append(given[-1])
    module = torch.fx.GraphModule(nn.Module(), program.graph)
    outs = module(*values_in)
    whole_output = program.out_spec.rebuild(list(outs[: program.n_outputs]), (), given)
    outputs = flatten(whole_output, is_tensor)[0]
    for i, dim in program.extra["split_outputs"].items():
        chunks = ((1, outputs[i].shape[dim] * axis[1], 1),)
        outputs[i] = all_gather(outputs[i], axis, dim, chunks, partial_grad=False)
    loss = _scalar(outputs)
    if loss.requires_grad:
        loss.backward()
    updates = [
        o
        for o, u in zip(outs[program.n_outputs :], program.updates, strict=True)
        if program.leaves[u].kind == "buffer"
    ]
    gradients = {n: t.grad for n, t in local.items()}
    return _Run(outputs, loss, gradients, [t.grad for t in given], updates, layouts, program)


def _scalar(outputs: list[Tensor]) -> Tensor:
    """The loss if the first output is one, else a fixed, uneven weighting of all outputs."""
    trained = [t for t in outputs if t.is_floating_point() and t.requires_grad]
    if not trained:
        return torch.zeros(())
    if trained[0].ndim == 0:
        return trained[0]
    total = torch.zeros((), dtype=torch.float64)
    for t in trained:
        weight = torch.cos(torch.arange(t.numel(), dtype=t.dtype) * 0.7 + 0.3).reshape(t.shape)
        total = total + (t * weight).mean()
    return total


def _differences(want: _Run, runs: list[_Run], names: list[str]) -> list[Difference]:
    tolerance = _tolerance(want.program)
    found: list[Difference] = []
    scale = max(
        [
            1e-30,
            *(float(g.abs().max()) for g in want.gradients.values() if g is not None and g.numel()),
        ]
    )

    def add(kind: str, name: str, a: Tensor | None, b: Tensor | None, floor: float) -> None:
        error = _error(a, b, floor)
        found.append(Difference(kind, name, error, error <= tolerance))

    for rank, run in enumerate(runs):
        for i, (a, b) in enumerate(zip(want.outputs, run.outputs, strict=True)):
            add("output", f"{i} (rank {rank})", a, b, 1e-3)
        for i, (a, b) in enumerate(zip(want.updates, run.updates, strict=True)):
            add("buffer", f"{i} (rank {rank})", a, b, 1e-3)
        for name, a, b in zip(names, want.inputs, run.inputs, strict=True):
            if a is not None or b is not None:
                add("gradient", f"{name} (rank {rank})", a, b, scale)
        add("loss", f"rank {rank}", want.loss, run.loss, 1e-3)
    for name, grad in want.gradients.items():
        parts = [run.gradients.get(name) for run in runs]
        if all(p is None for p in parts):
            add("gradient", name, grad, None, scale)
            continue
        layout = runs[0].layouts[name]
        if layout.dim is None:
            for rank, part in enumerate(parts):
                add("gradient", f"{name} (rank {rank})", grad, part, scale)
        else:
            filled = [torch.zeros(layout.local_shape()) if p is None else p for p in parts]
            add("gradient", name, grad, layout.from_locals(filled), scale)
    return found


def _error(want: Tensor | None, got: Tensor | None, floor: float) -> float:
    """Largest difference over the larger of the tensor's own size and the floor."""
    if want is None or got is None:
        present = want if got is None else got
        return 0.0 if present is None or not present.any() else float("inf")
    if want.shape != got.shape or want.dtype != got.dtype:
        return float("inf")
    if not want.numel():
        return 0.0
    wide = torch.complex128 if want.is_complex() else torch.float64
    a, b = want.detach().to(wide), got.detach().to(wide)
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    gap = (a - b)[a.isfinite()].abs()
    if not gap.numel():
        return 0.0
    return float(gap.max()) / max(float(a[a.isfinite()].abs().max()), floor)


def _tolerance(program: Program) -> float:
    """By the least precise float that any value of the program has."""
    kinds = {v.dtype for n in program.graph.nodes for v in values(n) if v.is_floating_point()}
    if kinds & {torch.bfloat16, torch.float16}:
        return 5e-2
    return 1e-9 if kinds <= {torch.float64} else 1e-4
