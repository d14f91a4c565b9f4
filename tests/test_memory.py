"""Saved activations, against the published formula and against what autograd keeps."""

import pytest
import torch
from gpt_layer import GPTLayer, kept_bytes
from models import MODELS

from tpcompile import InputError, pipeline
from tpcompile.formulas import Symbols, T
from tpcompile.memory import activation_formula, memory_of, optimizer_for
from tpcompile.planning import captured
from tpcompile.program import Program

B, S, H, A = 2, 64, 64, 4


def planned(size: int, *, scattered: bool) -> tuple[Program, GPTLayer, dict[str, torch.Tensor]]:
    """A planned layer in bfloat16, with dropout."""
    torch.manual_seed(0)
    model = GPTLayer(H, A).to(torch.bfloat16)
    inputs = {"x": torch.randn(B, S, H, dtype=torch.bfloat16, requires_grad=True)}
    program = captured(model, (), inputs)
    pipeline.plan(program, size, sequence_parallel=scattered)
    return program, model, inputs


CASES = [(1, False), (2, False), (4, False), (2, True), (4, True)]


@pytest.mark.parametrize(("size", "scattered"), CASES)
def test_layer_keeps_what_the_paper_counts(size: int, scattered: bool) -> None:
    """Korthikanti et al. 2022, equations 1, 2 and 4, and two differences, exactly.

    The paper leaves out the statistics of the two norms (a mean and a deviation in float32 for
    every token). With sequence parallelism its column parallel layers drop the inputs that they
    gathered, and gather them again in the backward; here the gathered ones are kept.
    """
    program, _, _ = planned(size, scattered=scattered)
    whole, split = (0, 34) if scattered or size == 1 else (10, 24)
    paper = S * B * H * (whole + (split + 5 * A * S / H) / size)
    statistics = 2 * (4 + 4) * S * B / (size if scattered else 1)
    gathered = 2 * 2 * S * B * H * (1 - 1 / size) if scattered else 0
    memory = memory_of(program)
    assert memory.rank["activations"] == paper + statistics + gathered
    assert memory.single["activations"] == S * B * (H * 34 + 5 * A * S) + 2 * 8 * S * B


@pytest.mark.parametrize(("size", "scattered"), CASES)
def test_estimate_is_what_autograd_keeps(size: int, scattered: bool) -> None:
    """Storages seen by hooks while a rank's graph runs; but for the 0-dim scale of a dropout."""
    program, model, inputs = planned(size, scattered=scattered)
    kept = kept_bytes(program, model, size, inputs)
    assert 0 <= kept - memory_of(program, device="cpu").rank["activations"] <= 6


@pytest.mark.parametrize("name", sorted(MODELS))
def test_estimate_of_whole_models(name: str) -> None:
    """Within a tenth on every architecture (CPU kernels keep more for RMSNorm than fused ones)."""
    example = MODELS[name]()
    program = captured(example.model, (), example.inputs)
    pipeline.plan(program, 2)
    kept = kept_bytes(program, example.model, 2, example.inputs)
    estimate = memory_of(program, device="cpu").rank["activations"]
    assert abs(estimate / kept - 1) < 0.1


@pytest.mark.parametrize(("size", "scattered"), CASES)
def test_formula_gives_the_bytes(size: int, scattered: bool) -> None:
    """The sympy expression at the example's sizes is the number, at twice the batch twice it."""
    program, _, _ = planned(size, scattered=scattered)
    symbols = Symbols(program.extra["sizes"], size)
    formula = activation_formula(program, symbols)
    assert symbols.value(formula) == memory_of(program).rank["activations"]
    assert formula.free_symbols <= symbols.values.keys()
    assert (T in formula.free_symbols) == (size > 1)
    double = {s: 2 * n if s.name == "b" else n for s, n in symbols.values.items()}
    assert float(formula.subs(double)) == 2 * symbols.value(formula)


@pytest.mark.parametrize(
    ("optimizer", "gradients", "states"),
    [
        ("none", 0, 0),
        ("sgd", 2, 0),
        ("sgd-momentum", 2, 2),
        ("adamw", 2, 4),
        ("adamw-mixed", 4, 12),
    ],
)
def test_bytes_of_a_parameter(optimizer: str, gradients: int, states: int) -> None:
    """Two bytes a weight; Megatron-LM's mixed precision has 18 with float32 gradients."""
    program, model, _ = planned(2, scattered=False)
    memory = memory_of(program, optimizer)
    count = sum(p.numel() for p in model.parameters())
    assert memory.single["weights"] == 2 * count
    assert memory.single["gradients"] == gradients * count
    assert memory.single["optimizer"] == states * count
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    halved = matrices + 7 * H  # biases of q, k, v and up
    assert memory.rank["weights"] == 2 * (count - halved / 2)


def test_unknown_optimizer() -> None:
    """The error names those that are known."""
    with pytest.raises(InputError) as error:
        optimizer_for("lion")
    assert str(error.value) == (
        "optimizer='lion' for a memory estimate.\n"
        "  no optimizer is known by that name.\n"
        "  fix: use one of none, sgd, sgd-momentum, adam, adamw, adamw-mixed, or a "
        "tpcompile.memory.Optimizer"
    )
