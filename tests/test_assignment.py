"""The chosen plan is the cheapest there is, costs what it says, and is the same every time."""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import models
import numpy as np
import pytest
import torch.nn.functional as F
from models import MODELS
from plans import assignment, planned, small
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array
from torch import Tensor, nn

from tpcompile.dump import dump
from tpcompile.placement import STAR, R
from tpcompile.problem import Problem

TESTS = Path(__file__).parent


def two_readers(m: nn.Module, x: Tensor) -> Tensor:
    """One value read by two linears and a product."""
    return m.a(x) + m.b(x) * x


def gated(m: nn.Module, x: Tensor) -> Tensor:
    """Half of a linear's output."""
    return m.b(m.a(x).chunk(2, -1)[0].sigmoid())


SMALL = {
    "mlp": (lambda m, x: m.b(F.gelu(m.a(x))), {"a": nn.Linear(8, 12), "b": nn.Linear(12, 8)}),
    "linear": (lambda m, x: m.a(x), {"a": nn.Linear(8, 12)}),
    "readers": (two_readers, {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8, bias=False)}),
    "reused": (lambda m, x: F.relu(m.a(x)) @ m.a.weight, {"a": nn.Linear(8, 12, bias=False)}),
    "norm": (lambda m, x: x + m.a(m.b(x)), {"a": nn.Linear(8, 8), "b": nn.LayerNorm(8)}),
    "gated": (gated, {"a": nn.Linear(8, 12), "b": nn.Linear(6, 8)}),
}


def least_by_enumeration(problem: Problem) -> float:
    """The least total over all choices, a row of numbers at a time."""
    assert math.prod(problem.domains) < 40_000_000
    order = sorted(range(len(problem.domains)), key=lambda v: problem.domains[v])
    *outer, a, b, c = order
    least = math.inf
    for picks in itertools.product(*(range(problem.domains[v]) for v in outer)):
        chosen = dict(zip(outer, picks, strict=True))
        total = np.zeros([problem.domains[v] for v in (a, b, c)])
        for scope, table in problem.factors:
            part = table[tuple(chosen.get(v, slice(None)) for v in scope)]
            free = [v for v in scope if v in (a, b, c)]
            axes = sorted(range(len(free)), key=lambda i: (a, b, c).index(free[i]))
            part = np.asarray(part).transpose(axes) if free else part
            total = total + np.reshape(
                part, [problem.domains[v] if v in free else 1 for v in (a, b, c)]
            )
        least = min(least, float(total.min()))
    return least


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", SMALL)
def test_against_brute_force(name: str, tp: int) -> None:
    """On small graphs no choice of all costs less."""
    function, children = SMALL[name]
    found = assignment(planned(small(function, **children), tp))
    assert found.ticks == least_by_enumeration(found.problem)


def least_by_integer_program(problem: Problem) -> float:
    """The least total, with a 0/1 column for each value and for each entry of a larger table."""
    costs: list[float] = []
    rows: list[tuple[list[int], list[float], float]] = []
    upper: list[float] = []

    def column(cost: float) -> int:
        costs.append(0.0 if cost == math.inf else cost)
        upper.append(0.0 if cost == math.inf else 1.0)
        return len(costs) - 1

    picks = [[column(0.0) for _ in range(size)] for size in problem.domains]
    for columns in picks:
        rows.append((columns, [1.0] * len(columns), 1.0))
    for scope, table in problem.factors:
        entries = {index: column(float(table[index])) for index in np.ndindex(table.shape)}
        for place, variable in enumerate(scope):
            for value, pick in enumerate(picks[variable]):
                inside = [c for index, c in entries.items() if index[place] == value]
                rows.append(([*inside, pick], [1.0] * len(inside) + [-1.0], 0.0))
    matrix = coo_array(
        (
            np.concatenate([weights for _, weights, _ in rows]),
            (
                np.repeat(np.arange(len(rows)), [len(columns) for columns, _, _ in rows]),
                np.concatenate([columns for columns, _, _ in rows]),
            ),
        ),
        shape=(len(rows), len(costs)),
    )
    sides = np.array([side for _, _, side in rows])
    # In microseconds, and to the last picosecond: HiGHS works with absolute tolerances.
    found = milp(
        np.array(costs) * 1e-6,
        integrality=np.ones(len(costs)),
        bounds=Bounds(0, np.array(upper)),
        constraints=LinearConstraint(matrix.tocsr(), sides, sides),
        options={"mip_rel_gap": 0.0},
    )
    assert found.status == 0, found.message
    chosen = [int(np.argmax(found.x[columns])) for columns in picks]
    return math.fsum(table.item(*[chosen[v] for v in scope]) for scope, table in problem.factors)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_against_an_integer_program(name: str, sequence_parallel: bool) -> None:
    """On two real layers, HiGHS finds nothing cheaper."""
    found = assignment(planned(name, 2, sequence_parallel))
    assert found.ticks == least_by_integer_program(found.problem)


@pytest.mark.parametrize("name", MODELS)
def test_certificate(name: str) -> None:
    """The graph costs exactly what the solver said, and reads no weight matrix from elsewhere."""
    for tp, sequence_parallel in ((2, True), (2, False), (4, True), (8, "auto")):
        program = planned(name, tp, sequence_parallel)
        promised, costs = program.extra["certificate"]
        assert costs == promised
        facts = program.extra["facts"]
        for node in program.calls():
            if "conversion" in node.meta and node.args[0] in facts.only_parameters:
                what = node.meta["conversion"]
                assert what.step.forward in ("", "all_reduce")
                if program.is_parameter(node.args[0]):
                    assert what.have in (R, STAR)
                    assert not what.step.forward


def test_work_is_linear_in_layers() -> None:
    """The largest table stays the same, and so does, but for ties, the work of one more layer."""
    sizes = []
    for layers in (2, 4, 6):
        problem = assignment(planned(models.llama(layers=layers), 4)).problem
        sizes.append((problem.solve().largest, problem.solve().work))
    (largest, first), (_, second), (_, third) = sizes
    assert {size[0] for size in sizes} == {largest}
    assert third - second == pytest.approx(second - first, rel=0.02)


def plan_text(name: str) -> str:
    """The whole plan of a model, captured anew, as text."""
    return dump(planned(MODELS[name](), 4))


def test_same_plan_every_time() -> None:
    """Twice in a process, and in a process that hashes text in another way."""
    text = plan_text("llama")
    assert plan_text("llama") == text
    code = "import sys, test_assignment as t; sys.stdout.write(t.plan_text('plain'))"
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(TESTS)}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout == plan_text("plain")
