"""Each pass after the assignment: the program before as Python, after it as text, and numbers."""

from collections.abc import Callable
from dataclasses import replace

import models
import pytest
import torch
import torch.nn.functional as F
from plans import TINY, assignment, planned, small
from torch import Tensor, fx, nn
from torch.distributed.tensor import Shard
from tpcompile.passes.certify_cost import certify_cost
from tpcompile.passes.eliminate_redundant import eliminate_redundant
from tpcompile.passes.insert_collectives import Conversion
from tpcompile.passes.localize import localize

import tpcompile
from tpcompile import collectives, pipeline
from tpcompile.clone import clone
from tpcompile.dims import Dim
from tpcompile.local_group import run_ranks
from tpcompile.pins import PlanLike
from tpcompile.placement import ALL_REDUCE, GATHER, GATHER_STAR, SPLIT, P, R, Step, Value
from tpcompile.problem import Assignment
from tpcompile.program import Leaf, Program
from tpcompile.sizes import Sizes


def calls_after(
    example: models.Example,
    stage: str,
    *,
    sequence_parallel: bool = False,
    plan: PlanLike | None = None,
) -> str:
    """The calls of a model's program on two ranks after a pass; the whole plan is right."""
    options = {"tp": 2, "sequence_parallel": sequence_parallel, "hardware": TINY, "plan": plan}
    report = tpcompile.verify(example.model, example.inputs, **options)
    assert report.ok, report
    text = tpcompile.stages(example.model, example.inputs, **options)[stage]
    leaves = ("= parameter", "= input", "= buffer")
    return "".join(
        f"{line}\n" for line in text.splitlines() if not line.split("  #")[0].endswith(leaves)
    )


def change(example: models.Example, before: str, after: str) -> str:
    """What the passes between two stages do to a model's program, with sequence parallelism."""
    options = {"tp": 2, "sequence_parallel": True, "hardware": TINY}
    report = tpcompile.verify(example.model, example.inputs, **options)
    assert report.ok, report
    lines = tpcompile.stages(example.model, example.inputs, **options).diff(before, after)
    return "".join(f"{line}\n" for line in lines.splitlines() if line[:2] in ("-%", "+%"))


def mlp() -> models.Example:
    """Two linears with biases."""
    return small(lambda m, x: m.b(F.relu(m.a(x))), a=nn.Linear(8, 12), b=nn.Linear(12, 8))


def norms() -> models.Example:
    """A residual stream, and two branches behind one norm."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.start(x)
        y = m.norm(h)
        return h + m.down(F.relu(m.up(y)) * m.gate(y))

    sizes = {"up": (8, 12), "gate": (8, 12), "down": (12, 8)}
    linears = {name: nn.Linear(*size, bias=False) for name, size in sizes.items()}
    return small(forward, start=nn.LayerNorm(8), norm=nn.LayerNorm(8), **linears)


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
%linear_default : f64[b, s, a.ffn] S(a.ffn) = linear(x, a.weight)
%add_tensor : f64[b, s, a.ffn] S(a.ffn) = add.Tensor(%linear_default, a.bias)
%relu : f64[b, s, a.ffn] S(a.ffn) = relu(%add_tensor)
%linear_default_1 : f64[b, s, b.out] P = linear(%relu, b.weight)
%all_reduce : f64[b, s, b.out] R = all_reduce(%linear_default_1)  # b, P -> R
%add_tensor_1 : f64[b, s, b.out] R = add.Tensor(%all_reduce, b.bias)
return (%add_tensor_1)
"""
    )


def test_insert_collectives_for_every_reader() -> None:
    """Readers of one value get conversions of their own."""
    assert (
        calls_after(norms(), "insert_collectives", sequence_parallel=True)
        == """\
%split : f64[b, s, down.ffn] S(s) = split(x)  # start, R -> S(s)
%copy : f64[down.ffn] R* = copy(start.weight)  # R -> R*, backward all_reduce
%copy_1 : f64[down.ffn] R* = copy(start.bias)  # R -> R*, backward all_reduce
%layer_norm : f64[b, s, down.ffn] S(s) = layer_norm(%split, [8], %copy, %copy_1, 1e-05, False)  # start
%copy_2 : f64[down.ffn] R* = copy(norm.weight)  # R -> R*, backward all_reduce
%copy_3 : f64[down.ffn] R* = copy(norm.bias)  # R -> R*, backward all_reduce
%layer_norm_1 : f64[b, s, down.ffn] S(s) = layer_norm(%layer_norm, [8], %copy_2, %copy_3, 1e-05, False)  # norm
%all_gather_1 : f64[b, s, down.ffn] R* = all_gather(%layer_norm_1)  # norm, S(s) -> R*, backward reduce_scatter
%all_gather : f64[b, s, down.ffn] R* = all_gather(%layer_norm_1)  # norm, S(s) -> R*, backward reduce_scatter
%linear : f64[b, s, up.ffn] S(up.ffn) = linear(%all_gather, up.weight)
%relu : f64[b, s, up.ffn] S(up.ffn) = relu(%linear)
%linear_1 : f64[b, s, up.ffn] S(up.ffn) = linear(%all_gather_1, gate.weight)
%mul : f64[b, s, up.ffn] S(up.ffn) = mul.Tensor(%relu, %linear_1)
%linear_2 : f64[b, s, down.ffn] P = linear(%mul, down.weight)
%reduce_scatter : f64[b, s, down.ffn] S(s) = reduce_scatter(%linear_2)  # down, P -> S(s), backward all_gather
%add : f64[b, s, down.ffn] S(s) = add.Tensor(%layer_norm, %reduce_scatter)
%all_gather_2 : f64[b, s, down.ffn] R = all_gather(%add)  # S(s) -> R
return (%all_gather_2)
"""  # noqa: E501
    )


def test_eliminate_redundant_merges() -> None:
    """One gather for both branches."""
    assert (
        change(norms(), "insert_collectives", "eliminate_redundant")
        == """\
-%all_gather : f64[b, s, down.ffn] R* = all_gather(%layer_norm_1)  # norm, S(s) -> R*, backward reduce_scatter
-%linear : f64[b, s, up.ffn] S(up.ffn) = linear(%all_gather, up.weight)
+%linear : f64[b, s, up.ffn] S(up.ffn) = linear(%all_gather_1, up.weight)
"""  # noqa: E501
    )


def test_partial_sums_are_added_first() -> None:
    """Two row parallel linears are reduced together, in both directions."""
    assert (
        calls_after(branches(), "eliminate_redundant")
        == """\
%linear : f64[b, s, a.ffn] S(a.ffn) = linear(x, a.weight)
%relu : f64[b, s, a.ffn] S(a.ffn) = relu(%linear)
%linear_1 : f64[b, s, b.out] P = linear(%relu, b.weight)
%linear_2 : f64[b, s, c.ffn] S(c.ffn) = linear(x, c.weight)
%relu_1 : f64[b, s, c.ffn] S(c.ffn) = relu(%linear_2)
%linear_3 : f64[b, s, b.out] P = linear(%relu_1, d.weight)
%add : f64[b, s, b.out] P = add.Tensor(%linear_1, %linear_3)
%all_reduce : f64[b, s, b.out] R = all_reduce(%add)  # P -> R
return (%all_reduce)
"""
    )


def test_bucket_gradients() -> None:
    """Gradients of norms' gains and biases are summed in one all-reduce."""
    assert (
        change(norms(), "localize", "bucket_gradients")
        == """\
-%copy : f64[down.ffn] R* = copy(start.weight, tp)  # R -> R*, backward all_reduce
-%copy_1 : f64[down.ffn] R* = copy(start.bias, tp)  # R -> R*, backward all_reduce
-%layer_norm : f64[b, s/2, down.ffn] S(s) = layer_norm(%split, [8], %copy, %copy_1, 1e-05, False)  # start
-%copy_2 : f64[down.ffn] R* = copy(norm.weight, tp)  # R -> R*, backward all_reduce
-%copy_3 : f64[down.ffn] R* = copy(norm.bias, tp)  # R -> R*, backward all_reduce
-%layer_norm_1 : f64[b, s/2, down.ffn] S(s) = layer_norm(%layer_norm, [8], %copy_2, %copy_3, 1e-05, False)  # norm
+%copy_many : 4 x f64[down.ffn] R* = copy_many(tp, start.weight, start.bias, norm.weight, norm.bias)  # R -> R*, backward all_reduce
+%getitem : f64[down.ffn] R* = getitem(%copy_many, 0)  # start
+%getitem_1 : f64[down.ffn] R* = getitem(%copy_many, 1)  # start
+%getitem_2 : f64[down.ffn] R* = getitem(%copy_many, 2)  # norm
+%getitem_3 : f64[down.ffn] R* = getitem(%copy_many, 3)  # norm
+%layer_norm : f64[b, s/2, down.ffn] S(s) = layer_norm(%split, [8], %getitem, %getitem_1, 1e-05, False)  # start
+%layer_norm_1 : f64[b, s/2, down.ffn] S(s) = layer_norm(%layer_norm, [8], %getitem_2, %getitem_3, 1e-05, False)  # norm
"""  # noqa: E501
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
        calls_after(attention(), "localize", plan={"out.weight": Shard(1)})
        == """\
# rank 0 of 2
%linear_default : f64[b, s, 3*heads[2 of 3]*head_dim] S(heads) = linear(x, qkv.weight)  # column parallel
%add_tensor : f64[b, s, 3*heads[2 of 3]*head_dim] S(heads) = add.Tensor(%linear_default, qkv.bias)
%reshape_default : f64[b, s, 3, heads[2 of 3], head_dim] S(heads) = reshape(%add_tensor, [2, 4, 3, -1, 2])
%permute : f64[3, b, heads[2 of 3], s, head_dim] S(heads) = permute(%reshape_default, [2, 0, 3, 1, 4])
%unbind : 3 x f64[b, heads[2 of 3], s, head_dim] S(heads) = unbind.int(%permute)
%getitem : f64[b, heads[2 of 3], s, head_dim] S(heads) = getitem(%unbind, 0)
%getitem_1 : f64[b, heads[2 of 3], s, head_dim] S(heads) = getitem(%unbind, 1)
%getitem_2 : f64[b, heads[2 of 3], s, head_dim] S(heads) = getitem(%unbind, 2)
%scaled_dot_product_attention : f64[b, heads[2 of 3], s, head_dim] S(heads) = scaled_dot_product_attention(%getitem, %getitem_1, %getitem_2)
%transpose : f64[b, s, heads[2 of 3], head_dim] S(heads) = transpose.int(%scaled_dot_product_attention, 1, 2)
%reshape : f64[b, s, heads[2 of 3]*head_dim] S(heads) = reshape(%transpose, [2, 4, -1])
%linear_1 : f64[b, s, out.out] P = linear(%reshape, out.weight)  # row parallel
%all_reduce : f64[b, s, out.out] R = all_reduce(%linear_1, tp)  # out, P -> R
return (%all_reduce)
"""  # noqa: E501
    )


class Stack(nn.Module):
    """Blocks, the last of which runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.LayerNorm(8)
        self.blocks = nn.ModuleList(models.Block(8, 2, 1, 12, 0.0) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, hidden] -> [b, s, hidden]."""
        x = self.start(x)
        for block in (*self.blocks, self.blocks[2]):
            x = block(x)
        return x


def test_split_blocks() -> None:
    """Blocks that run once are calls of graphs that are alike; one that runs twice is not."""
    torch.manual_seed(0)
    inputs = {"x": torch.randn(2, 4, 8, dtype=torch.float64)}
    example = models.Example(models.scrambled(Stack()), inputs)
    program = planned(example, hardware=TINY)
    pipeline.local(program, ("tp", 2, 0))
    pipeline.run(program, pipeline.EMIT)
    blocks = program.extra["blocks"]
    assert list(blocks) == ["blocks.0", "blocks.1"]
    codes = {fx.GraphModule(nn.Module(), block.graph).code for block in blocks.values()}
    assert len(codes) == 1
    left = {node.meta["path"] for node in program.calls()}
    assert left >= {"start", "blocks.2.qkv", "blocks.2.down"}
    assert not any(path.startswith(("blocks.0.", "blocks.1.")) for path in left)


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
        mine = clone(program)
        mine.extra["axis"] = axis
        localize(mine)
        x = torch.arange(32.0).view(4, 8).add(axis[2]).requires_grad_()
        outputs = fx.GraphModule(nn.Module(), mine.graph)(x)
        torch.stack([(y * y).sum() for y in outputs]).sum().backward()
        assert x.grad is not None
        return [*(y.detach() for y in outputs), x.grad]

    return run_ranks(2, run)
