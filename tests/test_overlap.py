"""Collectives beside other work: the same numbers, hidden time, and what the report says of it."""

import copy
import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama import assert_close, assert_trains_alike, gradients, llama, loss_for, pair, tokens
from slow_link import Counted, slow_link
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import tpcompile
from tpcompile import wire
from tpcompile.cost import CostModel
from tpcompile.errors import InputError, TpcompileError
from tpcompile.local_group import run_ranks
from tpcompile.pending import start, wait
from tpcompile.pipelining import Lane, best_chunks
from tpcompile.profiles import hardware_for


class Parallel(nn.Module):
    """Two branches of one input: the collectives of one can run beside the other."""

    def __init__(self, bias=False, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32, bias), nn.Linear(32, 16, bias)
        self.left, self.right = nn.Linear(16, 24, bias), nn.Linear(24, 16, bias)
        self.mix, self.dropout = nn.Linear(16, 16, bias), dropout

    def forward(self, x):
        """x: [b, s, 16] -> [b, s, 16]."""
        y = self.norm(x)
        first = torch.tanh(self.down(F.gelu(self.up(y))))
        second = torch.sin(self.right(F.silu(self.left(F.dropout(y, self.dropout)))))
        return x + self.mix(first) * second


class Twice(nn.Module):
    """Blocks, and linears that read what a norm reads too."""

    def __init__(self, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Parallel(bias) for _ in range(2))

    def forward(self, x):
        """x: [b, s, 16] -> [b, s, 16]."""
        for block in self.blocks:
            x = block(x)
        return x


def numbers(batch=2, length=8):
    """[batch, length, 16] in float64."""
    return torch.randn(batch, length, 16, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("chunks", [1, 2, 3, "auto"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [2, 3])
def test_numbers_are_those_of_one_device(chunks, sequence_parallel, tp):
    """Outputs, loss and all gradients, also where chunks do not divide and with biases."""
    x = numbers(2, 12)
    for model in (Twice().double(), Twice(bias=False).double()):
        options = {"sequence_parallel": sequence_parallel, "overlap_chunks": chunks}
        report = tpcompile.verify(model, (x,), tp=tp, **options)
        assert report.ok, report


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_chunks_of_a_llama(sequence_parallel):
    """Grouped-query attention and tied kv heads in two chunks on two ranks."""
    report = tpcompile.verify(
        llama(),
        {"input_ids": tokens()},
        tp=2,
        sequence_parallel=sequence_parallel,
        overlap_chunks=2,
    )
    assert report.ok, report


def check_training(sequence_parallel, chunks, frozen):
    """Three steps of AdamW from equal weights: outputs, gradients and parameters stay equal."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plain = llama(1)
    model = tpcompile.shard(
        copy.deepcopy(plain), mesh, {"input_ids": tokens()},
        sequence_parallel=sequence_parallel, overlap_chunks=chunks,
    )  # fmt: skip
    for each in (plain, model):
        each.model.embed_tokens.requires_grad_(not frozen)
        each.model.layers[0].self_attn.q_proj.requires_grad_(not frozen)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, model)]
    for step, shape in enumerate(((2, 8), (2, 8), (3, 10))):
        assert_trains_alike(plain, model, tokens(*shape, seed=step), tolerance=1e-10)
        for optimizer in optimizers:
            optimizer.step()
    full = tpcompile.full_state_dict(model)
    for name, value in plain.state_dict().items():
        assert_close(full[name], value, 1e-9)


@pytest.mark.parametrize(
    ("sequence_parallel", "chunks", "frozen"),
    [(True, 2, False)]
    + [
        pytest.param(scattered, chunks, frozen, marks=pytest.mark.slow)
        for scattered, chunks, frozen in [
            (False, 1, True),
            (False, 2, False),
            (True, 1, False),
            (True, 2, True),
        ]
    ],
)
def test_training_is_exact(ranks, sequence_parallel, chunks, frozen):
    """Several optimizer steps, sizes that chunks do and do not divide, frozen parameters too."""
    ranks(check_training, 2, sequence_parallel, chunks, frozen)


def counted_step(model, ids, seconds, blocking):
    """Multiply-adds that a step takes on a slow link, and the link's log."""
    clock = Counted()
    with clock, slow_link(clock, seconds, blocking) as log:
        loss_for(model, ids).backward()
    return clock.time, log


def check_hidden(chunks, delay):
    """(step in counted time, beside other work or not), where each collective takes `delay`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    ids = tokens(2, 16)
    model = tpcompile.shard(
        llama(num_key_value_heads=4), mesh, {"input_ids": ids},
        sequence_parallel=False, overlap_chunks=chunks,
    )  # fmt: skip
    seconds = (lambda n: delay) if chunks == 1 else (lambda n: n * delay)
    return [counted_step(model, ids, seconds, blocking) for blocking in (True, False)]


@pytest.mark.parametrize("delay", [1000.0, 1e6])
def test_weight_gradients_hide_the_collective_of_the_input_gradient(ranks, delay):
    """Exactly: each copy's all-reduce hides behind the multiply-adds of its weights' gradients."""
    rows, hidden, ffn, vocab, layers, tp = 32, 32, 48, 64, 2, 2
    beside = [rows * hidden * columns // tp for columns in (3 * hidden, 2 * ffn)] * layers
    beside.append(rows * hidden * vocab // tp)
    for (apart, log), (together, same) in ranks(check_hidden, 2, 1, delay):
        assert log.count == same.count == 2 + 2 * layers + 2 * layers + 1
        assert apart - together == sum(min(delay, work) for work in beside)
        assert log.waited == log.count * delay


def test_chunks_hide_the_collectives_of_row_parallel_linears(ranks):
    """Where sending a token takes as long as multiplying it, most of the sending is hidden."""
    steps = {chunks: ranks(check_hidden, 2, chunks, 12.0)[0] for chunks in (2, 4)}
    for (apart, log), (together, _) in steps.values():
        assert together < apart
        assert log.waited == log.sent
    shares = {n: log.waited / log.sent for n, (_, (_, log)) in steps.items()}
    assert shares[4] < shares[2] < 1


def branches(dropout=0.0):
    """One block."""
    torch.manual_seed(0)
    return Parallel(dropout=dropout).double()


def test_passes_on_the_graph():
    """Linears of one value are one call; the reduction of each branch runs beside the other."""
    options = {"tp": 2, "sequence_parallel": False}
    text = tpcompile.stages(branches(), (numbers(),), **options)["overlap_collectives"]
    words = (" start(", " wait(", " column_parallel(", "= linear(")
    lines = [line for line in text.splitlines() if any(word in line for word in words)]
    assert lines == [
        "%column_parallel : f64[b, s, up.ffn/2], f64[b, s, left.ffn/2] S(up.ffn) S(left.ffn) = "
        "column_parallel(%layer_norm, tp, None, [up.weight, left.weight])"
        "  # column parallel, R -> R*, backward all_reduce",
        "%linear_1 : f64[b, s, down.ffn] P = linear(%gelu, down.weight)  # row parallel",
        "%start : f64[b, s, down.ffn] P = start(all_reduce, %linear_1, tp)  # down",
        "%linear_3 : f64[b, s, right.ffn] P = linear(%silu, right.weight)  # row parallel",
        "%all_reduce : f64[b, s, down.ffn] R = wait(%start)  # down, P -> R",
        "%start_1 : f64[b, s, right.ffn] P = start(all_reduce, %linear_3, tp)  # right",
        "%linear_4 : f64[b, s, right.ffn] R = linear(%tanh, mix.weight)",
        "%all_reduce_1 : f64[b, s, right.ffn] R = wait(%start_1)  # right, P -> R",
    ]


def test_random_numbers_keep_their_order():
    """Work that draws random numbers is not moved: the masks are those of one device."""
    report = tpcompile.verify(branches(dropout=0.5), (numbers(),), tp=2, sequence_parallel=False)
    assert report.ok, report


def check_second_order():
    """The error of a gradient of a gradient, through linears of one value."""
    _, model = pair()
    loss = loss_for(model, tokens())
    weights = [p for n, p in model.named_parameters() if "q_proj" in n]
    with pytest.raises(TpcompileError, match="only gradients of the first order"):
        torch.autograd.grad(loss, weights, create_graph=True)


def test_gradients_of_gradients_are_refused(ranks):
    """Also by the call that has linears and their copy in one."""
    ranks(check_second_order, 2)


def check_input_gradient_only():
    """Gradients by hand: of a linear's output to its input, nothing else asked for."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plain = Twice().double()
    torch.manual_seed(1)
    x = numbers()
    model = tpcompile.shard(copy.deepcopy(plain), mesh, (x,), sequence_parallel=False)
    for module in (plain, model):
        module.requires_grad_(False)
    wanted, found = (torch.autograd.grad(m(x).square().sum(), x) for m in (plain, model))
    assert_close(found, wanted)
    with torch.no_grad():
        assert_close(model(x), plain(x))


def test_frozen_model_gives_input_gradients(ranks):
    """No weight trains, and the input's gradient is still summed over the ranks."""
    ranks(check_input_gradient_only, 2)


def check_other_chunks(rank_chunks):
    """The error where ranks ask for other numbers of chunks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    chunks = rank_chunks[dist.get_rank()]
    with pytest.raises(TpcompileError, match="overlap_chunks") as caught:
        tpcompile.shard(llama(1), mesh, {"input_ids": tokens()}, overlap_chunks=chunks)
    return str(caught.value)


def test_ranks_must_ask_for_the_same_chunks(ranks):
    """They would wait for one another's collectives for ever."""
    assert (
        "ranks 0 and 1 differ in overlap_chunks: 2 and 4" in ranks(check_other_chunks, 2, (2, 4))[0]
    )


@pytest.mark.parametrize("chunks", [0, "many", 1.5, True])
def test_chunks_are_a_number_or_auto(chunks):
    """Anything else is an error before any work."""
    with pytest.raises(InputError) as caught:
        tpcompile.verify(branches(), (numbers(),), tp=2, overlap_chunks=chunks)
    assert str(caught.value) == (
        f"overlap_chunks={chunks!r}\n"
        "  it is the number of chunks in which linears and their collectives run\n"
        '  fix: pass 1 (no chunks), more, or "auto" to let the cost decide'
    )


def check_checkpointed(use_reentrant):
    """Exact gradients, and no collective that was started and never waited for."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    x = numbers()
    plain = nn.Sequential(Parallel(), Parallel()).double()
    model = tpcompile.shard(copy.deepcopy(plain), mesh, (x,), sequence_parallel=False)
    wanted = torch.autograd.grad(plain(x).square().sum(), (x, *plain.parameters()))
    for block in model:
        block.forward = partial(checkpoint, block.forward, use_reentrant=use_reentrant)
    started, waited, run = [], [], wire.Started

    class Noted(run):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

        def wait(self):
            waited.append(self)
            return super().wait()

    wire.Started = Noted
    try:
        model(x).square().sum().backward()
    finally:
        wire.Started = run
    found = [x.grad, *gradients(model).values()]
    assert_close(found, list(wanted))
    assert len(started) == len(waited)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_around_halves(ranks, use_reentrant):
    """A block is run again in the backward."""
    ranks(check_checkpointed, 2, use_reentrant)


def test_a_collective_that_nobody_waits_for_is_waited_for():
    """A second forward that stops between the halves leaves nothing behind."""

    def run(axis):
        waits = []
        x = torch.ones(3, dtype=torch.float64).requires_grad_()
        pending, ticket = start("all_reduce", x, axis)
        assert pending.forward is not None
        pending.forward.then(lambda y: waits.append(y.tolist()) or y)
        del pending, ticket
        gc.collect()
        pending, ticket = start("all_reduce", x, axis)
        assert wait((pending, ticket)).tolist() == [2.0] * 3
        assert pending.forward is None
        return waits

    assert run_ranks(2, run) == [[[2.0] * 3]] * 2


def check_compiled(chunks):
    """One graph with branches side by side, and with chunks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    x = numbers()
    plain = Twice().double()
    model = tpcompile.shard(
        copy.deepcopy(plain), mesh, (x,), sequence_parallel=False, overlap_chunks=chunks
    )
    torch.compiler.reset()
    call = torch.compile(model, fullgraph=True, backend="aot_eager")
    wanted, found = (torch.autograd.grad(m(x).square().sum(), x) for m in (plain, call))
    assert_close(found, wanted)


@pytest.mark.parametrize("chunks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_compiler_sees_the_plain_form(ranks, chunks):
    """Halves and chunks do not break the graph."""
    ranks(check_compiled, 2, chunks)


def lane(rows, width, hardware="h100-nvlink"):
    """A row parallel linear of `width` on 8 ranks, in bf16."""
    cost = CostModel(8, hardware_for(hardware))
    nbytes = 2.0 * rows * width
    return Lane("all_reduce", nbytes, rows, width, width / 2, torch.bfloat16, cost)


def test_chunks_where_they_pay():
    """Long sequences of a wide model run in chunks; a few tokens do not."""
    wide, narrow = lane(16384, 8192), lane(64, 256)
    assert best_chunks([wide]) > 1
    assert wide.together(best_chunks([wide])) < 0.9 * wide.apart()
    assert best_chunks([narrow]) == 1
    assert narrow.together(1) == pytest.approx(narrow.apart())


def check_report():
    """The report, and one that has notes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    _, model = pair(mesh=mesh)
    chunked = tpcompile.shard(
        llama(), mesh, {"input_ids": tokens()}, sequence_parallel=False, overlap_chunks=2
    )
    return str(tpcompile.overlap(model)), str(tpcompile.overlap(chunked))


def test_report(ranks, golden):
    """Where collectives run beside other work, where not, and what chunks change."""
    plain, chunked = ranks(check_report, 2)[0]
    golden("overlap_llama", f"{plain}\n\n{chunked}")
    assert "weight gradients, 2 chunks" in chunked
