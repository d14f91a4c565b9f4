"""Each pass after the assignment: the program before as Python, after it as text, and numbers."""

from collections.abc import Callable
from dataclasses import replace

import models
import pytest
import torch
import torch.nn.functional as F
from plans import EAGER, assignment, planned, small
from torch import Tensor, fx, nn
from tpcompile.passes.certify_cost import certify_cost
from tpcompile.passes.eliminate_redundant import eliminate_redundant
from tpcompile.passes.insert_collectives import Conversion
from tpcompile.passes.localize import localize

import tpcompile
from tpcompile import collectives, pipeline
from tpcompile.dims import Dim
from tpcompile.local_group import run_ranks
from tpcompile.placement import ALL_REDUCE, GATHER, GATHER_STAR, SPLIT, P, R, Step, Value
from tpcompile.problem import Assignment
from tpcompile.program import Leaf, Program
from tpcompile.sizes import Sizes


def calls_after(
    example: models.Example, stage: str, tp: int = 2, sequence_parallel: bool | str = False
) -> str:
    """The calls of a model's program after a pass; the whole plan is right."""
    options = {"tp": tp, "sequence_parallel": sequence_parallel, "hardware": EAGER}
    report = tpcompile.verify(example.model, example.inputs, **options)
    assert report.ok, report
    text = tpcompile.stages(example.model, example.inputs, **options)[stage]
    leaves = ("= parameter", "= input", "= buffer")
    return "".join(
        f"{line}\n" for line in text.splitlines() if not line.split("  #")[0].endswith(leaves)
    )


def mlp() -> models.Example:
    """Two linears with biases."""
    return small(lambda m, x: m.b(F.relu(m.a(x))), a=nn.Linear(8, 12), b=nn.Linear(12, 8))


def norms() -> models.Example:
    """Two branches behind one norm, and a residual."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.start(x)
        y = m.norm(h)
        return h + m.down(F.relu(m.up(y)) * m.gate(y))

    sizes = {"up": (8, 12), "gate": (8, 12), "down": (12, 8), "start": (8, 8)}
    linears = {name: nn.Linear(*size, bias=False) for name, size in sizes.items()}
    return small(forward, norm=nn.LayerNorm(8), **linears)


def branches() -> models.Example:
    """The sum of two pairs of linears."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.b(F.relu(m.a(x))) + m.d(F.relu(m.c(x)))

    sizes = {"a": (8, 12), "b": (12, 8), "c": (8, 10), "d": (10, 8)}
    return small(forward, **{k: nn.Linear(*size, bias=False) for k, size in sizes.items()})


def test_insert_collectives() -> None:
    """A column parallel linear takes a copy, a row parallel one's partial sums are reduced."""
    assert (
        calls_after(mlp(), "insert_collectives")
        == """\
"""
    )


def test_insert_collectives_for_every_reader() -> None:
    """Readers of one value get conversions of their own."""
    assert (
        calls_after(norms(), "insert_collectives", sequence_parallel=True)
        == """\
"""
    )


def test_eliminate_redundant_merges() -> None:
    """One gather for both branches."""
    assert (
        calls_after(norms(), "eliminate_redundant", sequence_parallel=True)
        == """\
"""
    )


def test_partial_sums_are_added_first() -> None:
    """Two row parallel linears are reduced together, in both directions."""
    assert (
        calls_after(branches(), "eliminate_redundant")
        == """\
"""
    )


def test_bucket_gradients() -> None:
    """Gradients of a norm's gain and bias are summed in one all-reduce."""
    assert (
        calls_after(norms(), "bucket_gradients", sequence_parallel=True)
        == """\
"""
    )


def attention() -> models.Example:
    """Three heads of two, so that two ranks have unequal shares."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).view(2, 4, 3, 3, 2).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return m.out(y.transpose(1, 2).reshape(2, 4, 6))

    return small(forward, qkv=nn.Linear(8, 18), out=nn.Linear(6, 8, bias=False))


def test_localize() -> None:
    """Literal sizes become this rank's, of three heads two; collectives know axis and layout."""
    assert (
        calls_after(attention(), "localize")
        == """\
"""
    )


class Stack(nn.Module):
    """Blocks, the last of which runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(models.Block(8, 2, 1, 12, 0.0) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, hidden] -> [b, s, hidden]."""
        for block in (*self.blocks, self.blocks[2]):
            x = block(x)
        return x


def test_split_blocks() -> None:
    """Blocks that run once are calls of graphs that are alike; one that runs twice is not."""
    torch.manual_seed(0)
    inputs = {"x": torch.randn(2, 4, 8, dtype=torch.float64)}
    example = models.Example(models.scrambled(Stack()), inputs)
    program = planned(example, hardware=EAGER)
    pipeline.local(program, ("tp", 2, 0))
    pipeline.run(program, pipeline.EMIT)
    blocks = program.extra["blocks"]
    assert list(blocks) == ["blocks.0", "blocks.1"]
    codes = {fx.GraphModule(nn.Module(), block.graph).code for block in blocks.values()}
    assert len(codes) == 1
    assert {node.meta["path"] for node in program.calls() if node.meta["path"]} == {
        "blocks.0", "blocks.1", "blocks.2", *(
            f"blocks.2.{part}" for part in ("norm1", "norm2", "qkv", "out", "gate_up", "down")
        ),
    }  # fmt: skip


def test_certify_cost() -> None:
    """A graph that costs more than the solver said is refused."""
    program = planned("plain")
    plan = assignment(program)
    promised, costs = program.extra["certificate"]
    assert promised == costs == plan.ticks
    program.extra["assignment"] = replace(plan, ticks=plan.ticks - 1)
    with pytest.raises(AssertionError) as error:
        certify_cost(program)
    assert str(error.value) == f"the graph costs {costs} ps, the solver said {promised - 1}"


class Conversions:
    """A program of nothing but conversions of one partial sum `x` [4, 8]."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.dims = (Dim(4), Dim(8))
        self.x = self.graph.placeholder("x")
        self.x.meta.update(val=torch.empty(4, 8), dims=[self.dims])

    def convert(self, source: fx.Node, step: Step, have: object, need: object) -> fx.Node:
        """One more conversion."""
        node = self.graph.call_function(getattr(collectives, step.function), (source,))
        node.meta.update(self.x.meta)
        node.meta["conversion"] = Conversion(step, have, need, Value(128, True, False))
        return node

    def program(self, *outputs: fx.Node) -> Program:
        """The program that returns some conversions."""
        self.graph.output(outputs)
        plan = Assignment({}, {}, {}, 0.0, problem=None)  # type: ignore[arg-type]
        extra = {"assignment": plan, "sizes": Sizes({})}
        return Program(self.graph, {"x": Leaf("input", "x")}, n_outputs=len(outputs), extra=extra)


def gathered_and_split(c: Conversions) -> Program:
    """What is split again by the dim that it was gathered along."""
    split = c.convert(c.convert(c.x, ALL_REDUCE, P, R), SPLIT, R, c.dims[0])
    again = c.convert(c.convert(split, GATHER, c.dims[0], R), SPLIT, R, c.dims[0])
    return c.program(c.convert(again, GATHER_STAR, c.dims[0], R))


def gathered_and_split_otherwise(c: Conversions) -> Program:
    """What is split by another dim."""
    split = c.convert(c.convert(c.x, ALL_REDUCE, P, R), SPLIT, R, c.dims[0])
    return c.program(c.convert(c.convert(split, GATHER, c.dims[0], R), SPLIT, R, c.dims[1]))


def reduced_for_two(c: Conversions) -> Program:
    """A sum that is read whole, too."""
    whole = c.convert(c.x, ALL_REDUCE, P, R)
    return c.program(whole, c.convert(whole, SPLIT, R, c.dims[1]))


@pytest.mark.parametrize(
    ("make", "remaining"),
    [
        (gathered_and_split, ["reduce_scatter", "all_gather"]),
        (gathered_and_split_otherwise, ["reduce_scatter", "all_gather", "split"]),
        (reduced_for_two, ["all_reduce", "split"]),
    ],
)
def test_opposites_cancel(make: Callable[[Conversions], Program], remaining: list[str]) -> None:
    """A split undoes a gather along the same dim; a reduction that only it reads scatters instead.

    Values and gradients are the same on both ranks.
    """
    after = eliminate_redundant(make(Conversions()))
    assert [node.target.__name__ for node in after.calls()] == remaining
    found = [_run(program) for program in (make(Conversions()), after)]
    torch.testing.assert_close(found[1], found[0])


def _run(program: Program) -> list[list[Tensor]]:
    """Outputs and input gradient on two ranks."""

    def run(axis: tuple[str, int, int]) -> list[Tensor]:
        mine = planned_copy(program, axis)
        x = torch.arange(32.0).view(4, 8).add(axis[2]).requires_grad_()
        outputs = fx.GraphModule(nn.Module(), mine.graph)(x)
        torch.stack([(y * y).sum() for y in outputs]).sum().backward()
        assert x.grad is not None
        return [*(y.detach() for y in outputs), x.grad]

    return run_ranks(2, run)


def planned_copy(program: Program, axis: tuple[str, int, int]) -> Program:
    """The program of one rank."""
    from tpcompile.clone import clone

    mine = clone(program)
    mine.extra["axis"] = axis
    return localize(mine)
