"""The torch.compile backend on real ranks: numbers, compilations, memory."""

import gc
import warnings
from pathlib import Path

import compiled_models as cm
import pytest
import torch
from llama import assert_close, gradients, llama, loss_for, tokens
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

import tpcompile

SLOW = pytest.mark.slow
SMALL = [
    *("breaks", "sizes", "python", "elementwise", "later"),
    *(
        pytest.param(name, marks=SLOW)
        for name in (
            *("mlp", "no_grad", "autocast", "checkpoint", "statistics", "in_place", "structure"),
        )
    ),
]


def example_of(name):
    """An example by its name."""
    if name in ("gpt2", "bert"):
        return cm.hf(name)
    if name == "gpt2_layer":
        return cm.hf("gpt2", layers=1)
    return getattr(cm, name)() if name in ("t5", "encoder") else cm.small(name)


def check_trains(name, options, lengths=(8, 8, 6, 10)):
    """A step at each length, then evaluation: graphs until then, and those that broke."""
    example = example_of(name)
    pair = cm.Pair.of(example, **options)
    for length in lengths:
        pair.step(cm.cut(example.inputs, length))
    text = pair.backend.explain()
    graphs = len(text.pieces), sum(piece.broke for piece in text.pieces)
    if len(lengths) > 2:
        pair.evaluate(example.inputs)
    return graphs


GRAPHS = {"breaks": (6, 4), "sizes": (4, 2)}
"""(graphs, those that end in a break), where not (2, 0): once for length 8, once for others."""


@pytest.mark.parametrize("name", SMALL)
def test_small_models_train_alike(ranks, name):
    """Loss, gradients, parameters after AdamW: whatever a graph has, and whatever is between."""
    assert ranks(check_trains, 2, name, {}) == [GRAPHS.get(name, (2, 0))] * 2


def test_a_model_that_breaks_trains_alike(ranks):
    """GPT-2 with labels, two steps."""
    assert ranks(check_trains, 2, "gpt2_layer", {}, (8, 8)) == [(2, 1)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_models_train_alike(ranks, name):
    """Hugging Face models; GPT-2 with labels breaks on a call that logs."""
    graphs = {"gpt2": (4, 2)}.get(name, (2, 0))
    assert ranks(check_trains, 2, name, {}, timeout=600.0) == [graphs] * 2


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"inner": "aot_eager"}, {"sequence_parallel": True}])
def test_options_train_alike(ranks, options):
    """Another inner compiler; sequences split."""
    assert ranks(check_trains, 2, "bert", options) == [(2, 0)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "breaks"])
def test_inductor_trains_alike(ranks, name):
    """Generated code."""
    graphs = {"breaks": (6, 4)}.get(name, (2, 0))
    assert ranks(check_trains, 2, name, {"inner": "inductor"}, timeout=600.0) == [graphs] * 2


def line_of(text, after=0):
    """`file.py:12`, where `text` is in the file of the models, or lines after it."""
    lines = [line.strip() for line in Path(cm.__file__).read_text().splitlines()]
    return f"compiled_models.py:{lines.index(text) + 1 + after}"


def check_whole(name):
    """Why graphs of an example run whole; what Python read whole."""
    example = cm.encoder() if name == "encoder" else cm.small(name)
    pair = cm.Pair.of(example)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            pair.step(example.inputs)
        pair.evaluate(example.inputs)
    reasons = {piece.whole for piece in pair.backend.explain().pieces} - {""}
    assert all(isinstance(p, DTensor) for p in pair.model.parameters())
    return sorted(reasons), sorted({str(each.message).split(":")[0] for each in caught})


CANNOT = ["tpcompile cannot split a graph, and runs it whole"]


def test_what_cannot_be_split_runs_whole(ranks):
    """A custom autograd function keeps its backward; its weights are sharded where they lie."""
    reason = (
        f"shard a graph with a custom autograd function. {line_of('return x.cumsum(1)')}: its "
        "backward would be lost, as it does not map elements to elements."
    )
    assert ranks(check_whole, 2, "custom") == [([reason], CANNOT)] * 2


@pytest.mark.slow
def test_a_graph_that_cannot_take_the_placements_runs_whole(ranks):
    """In evaluation torch's encoder layers become one op, which has no rule."""
    reasons, warned = ranks(check_whole, 2, "encoder")[0]
    assert CANNOT[0] in warned
    assert reasons == [
        "in its graph the parameter cannot be split so: ParamLayout(shape=(96,), dim=0, "
        "segments=((3, 4, 8),), size=2)"
    ]


def check_lengths(sequence_parallel, named):
    """Graphs after each of 20 lengths, and what Dynamo counts; then layouts of all graphs."""
    torch.compiler.reset()
    counters.clear()
    plain, model = llama(layers=1), llama(layers=1)
    if named:
        options = {"mesh": cm.mesh(), "inner": "eager", "sequence_parallel": sequence_parallel}
        call = torch.compile(model, backend="tpcompile", options=options)
    else:
        backend = tpcompile.backend(cm.mesh(), inner="eager", sequence_parallel=sequence_parallel)
        call = torch.compile(model, backend=backend)
    placed = None
    for length in (8, 12, 7, *range(13, 30)):
        ids = tokens(2, length)
        losses = [loss_for(each, ids) for each in (plain, call)]
        assert_close(losses[1].detach(), losses[0].detach())
        for each, loss in zip((plain, model), losses, strict=True):
            each.zero_grad()
            loss.backward()
        assert_close(gradients(model), gradients(plain))
        placements = {name: str(p.placements) for name, p in model.named_parameters()}
        assert placed in (None, placements)
        placed = placements
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("sequence_parallel", "graphs"),
    [pytest.param(False, 2, marks=pytest.mark.slow), (True, 3)],
)
def test_twenty_lengths_take_few_graphs(ranks, sequence_parallel, graphs):
    """One for the first, one for all others; one more for those that the degree divides."""
    named = not sequence_parallel
    assert ranks(check_lengths, 2, sequence_parallel, named) == [graphs] * 2


def check_dynamic():
    """Graphs of a model that is compiled for all sizes at once, in two dims."""
    example = cm.small("mlp")
    pair = cm.Pair.of(example)
    pair.call = torch.compile(pair.model, backend=pair.backend, dynamic=True)
    generator = torch.Generator().manual_seed(2)
    for batch, length in ((2, 9), (3, 6), (5, 7)):
        x = torch.randn(batch, length, 8, dtype=torch.float64, generator=generator)
        pair.step({"x": x})
    return pair.backend.captures


def test_dynamic_from_the_start(ranks):
    """One graph."""
    assert ranks(check_dynamic, 2) == [1, 1]


def check_two_models():
    """Two models that one backend compiles."""
    backend = tpcompile.backend(cm.mesh(), inner="eager")
    for _ in range(2):
        example = cm.small("mlp")
        pair = cm.Pair.of(example)
        pair.call = torch.compile(pair.model, backend=backend)
        pair.step(example.inputs)
    return len(list(backend.parameters()))


def test_one_backend_for_two_models(ranks):
    """Each has its own parameters; the backend gives those of both."""
    assert ranks(check_two_models, 2) == [20, 20]


def check_memory(given):
    """Bytes of parameters, all tensors that Python sees, and the most that a rank may hold."""
    gc.collect()
    before = storage_bytes()
    example = cm.small("python")
    model = example.model
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    before_optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    backend = tpcompile.backend(cm.mesh(), inner="eager", model=model if given else None)
    torch.compiler.reset()
    call = torch.compile(model, backend=backend)
    for _ in range(2):
        cm.loss_of(call(**example.inputs)).backward()
        before_optimizer.step()
        before_optimizer.zero_grad()
    before_optimizer.state.clear()
    parts = sum(p.to_local().numel() * p.element_size() for p in model.parameters())
    gc.collect()
    return parts / whole, (storage_bytes() - before) / whole


def storage_bytes():
    """Bytes of all storages of real tensors that the garbage collector knows."""
    found = {}
    for each in gc.get_objects():
        kind = type(each)
        if not issubclass(kind, Tensor) or kind.__name__ == "FakeTensor":
            continue
        each = each.to_local() if issubclass(kind, DTensor) else each
        if each.device.type == "cpu":
            found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(found.values())


@pytest.mark.parametrize("given", [True, False])
def test_no_whole_parameter_stays(ranks, given):
    """A rank holds half, also of what no graph reads, and of what an optimizer had before."""
    for parts, held in ranks(check_memory, 2, given):
        assert 0.5 <= parts < 0.6
        assert held < parts + 0.15  # inputs and activations


def check_frozen():
    """Gradients with some parameters frozen and others trained again; graphs, and plans."""
    example = cm.small("mlp")
    pair = cm.Pair.of(example)
    pair.step(example.inputs)
    for names in (["down.bias"], ["up.weight", "down.weight"], ["up.bias"]):
        for model in (pair.plain, pair.model):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name in names)
        pair.step(example.inputs)
    (piece,) = pair.backend.explain().pieces
    return piece.variants


def test_freezing_after_the_trace_is_seen(ranks):
    """Dynamo sees none of it: the graph is planned again for each set of trained parameters."""
    assert ranks(check_frozen, 2) == [4] * 2


def check_explanation():
    """The text without the plans."""
    example = cm.small("breaks")
    pair = cm.Pair.of(example)
    pair.step(example.inputs)
    text = str(pair.backend.explain())
    return [line for line in text.splitlines() if line.startswith(("graph ", "  ", "3 graphs"))]


def test_explain_says_where_and_why_graphs_broke(ranks):
    """Each graph with its line, the reason, and whether it reads parameters."""
    lines = ranks(check_explanation, 2)[0]
    assert [line for line in lines if not line.startswith("  ")] == [
        "3 graphs, 2 of them end in a break; 3 compiled",
        f"graph 0 breaks at {line_of('y = self.down(y)', -1)}",
        f"graph 1 breaks at {line_of('y = self.down(y)', 1)}",
        f"graph 2 returns at {line_of('y = self.down(y)', 2)}",
    ]
    assert "  Call to `torch._dynamo.graph_break()`" in lines
    assert lines[-1] == "  reads no parameter: runs whole on every rank"
