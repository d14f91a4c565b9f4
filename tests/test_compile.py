"""torch.compile of a sharded model, whole and block by block, on real ranks."""

import pytest
import torch
from llama import assert_close, assert_trains_alike, gradients, loss_for, pair, tokens
from torch._dynamo.utils import counters


class Compiled:
    """Sharded model compiled whole, beside the plain one; counts graphs."""

    def __init__(self, backend, sequence_parallel=False):
        torch.compiler.reset()
        counters.clear()
        self.plain, self.model = pair(sequence_parallel)
        self.call = torch.compile(self.model, fullgraph=True, backend=backend)

    def check(self, ids, tolerance=1e-12, **kwargs):
        """Loss and gradients are equal; how many graphs there are so far."""
        losses = []
        # A trace cannot make a capture; the model itself can.
        loss_for(self.model, ids, **kwargs)
        for each in (self.plain, self.call):
            each.zero_grad()
            losses.append(loss_for(each, ids, **kwargs))
            losses[-1].backward()
        assert_close(losses[1].detach(), losses[0].detach(), tolerance)
        assert_close(gradients(self.model), gradients(self.plain), tolerance)
        return counters["stats"]["unique_graphs"]


def check_whole(backend, sequence_parallel):
    """Three steps: graphs after each."""
    compiled = Compiled(backend, sequence_parallel)
    # Generated code fuses the float32 parts of the norms, which rounds them differently.
    tolerance = 1e-12 if backend == "aot_eager" else 1e-8
    return [compiled.check(tokens(seed=seed), tolerance) for seed in range(3)]


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
def test_whole_model_is_one_graph(ranks, sequence_parallel):
    """Forward and backward; the second step compiles nothing."""
    graphs = ranks(check_whole, 2, "aot_eager", sequence_parallel)
    assert all(steps[0] == steps[2] > 0 for steps in graphs)


@pytest.mark.slow
def test_whole_model_by_inductor(ranks):
    """Generated code gives the same numbers."""
    graphs = ranks(check_whole, 2, "inductor", False, timeout=600.0)
    assert all(steps[0] == steps[2] > 0 for steps in graphs)


def check_sizes(sequence_parallel):
    """Graphs after each of some sizes."""
    compiled = Compiled("eager", sequence_parallel)
    shapes = ((2, 8), (3, 12), (2, 6), (4, 10), (1, 5), (2, 7), (2, 8), (4, 10))
    return [compiled.check(tokens(*shape)) for shape in shapes]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sequence_parallel", "graphs"),
    [
        (False, [1, 2, 2, 2, 3, 4, 4, 4]),
        (True, [1, 2, 2, 2, 3, 4, 5, 5]),
    ],
)
def test_other_sizes_compile_a_dynamic_graph_once(ranks, sequence_parallel, graphs):
    """A batch of 1 and a length that sequence parallelism cannot split take one more each.

    So does the first call after another capture was made.
    """
    assert ranks(check_sizes, 2, sequence_parallel) == [graphs] * 2


def check_calls():
    """Other ways to pass arguments, other structures, modes and trained parameters."""
    compiled = Compiled("eager")
    plain, call = compiled.plain, compiled.call
    ids, mask = tokens(), torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    compiled.check(ids, attention_mask=None, use_cache=False)
    compiled.check(ids, attention_mask=mask)
    wanted = plain(ids, mask, labels=ids).loss
    compiled.model(ids, mask, labels=ids)
    assert_close(call(ids, mask, labels=ids).loss, wanted, 1e-5)
    assert_close(call(labels=ids, attention_mask=mask, input_ids=ids).loss, wanted, 1e-5)
    for each in (plain, compiled.model):
        each.eval()
    compiled.check(ids)
    for each in (plain, compiled.model):
        each.model.requires_grad_(False)
    compiled.check(ids)
    with torch.no_grad():
        compiled.model(ids)
        assert_close(call(ids).logits, plain(ids).logits)


@pytest.mark.slow
def test_other_calls(ranks):
    """A trace finds the capture that the call needs."""
    ranks(check_calls, 2)


def check_opaque():
    """The error for an argument that a trace cannot describe."""
    compiled = Compiled("eager")
    with pytest.raises(Exception, match=r"compile of a sharded") as caught:
        compiled.call(tokens(), unknown=range(3))
    return str(caught.value)


def test_arguments_of_other_classes_are_refused(ranks):
    """With our text, inside torch.compile's own error."""
    text = ranks(check_opaque, 2)[0]
    assert (
        "torch.compile of a sharded LlamaForCausalLM called with an argument of a class of its "
        "own\n  a trace can tell tensors, numbers, strings, lists, tuples and dicts apart\n"
        "  fix: pass the tensors themselves, or compile the blocks instead: block.compile()"
    ) in text


def check_blocks(sequence_parallel):
    """Graphs after each step, blocks compiled one by one."""
    torch.compiler.reset()
    counters.clear()
    plain, model = pair(sequence_parallel)
    for block in model.model.layers:
        block.compile(fullgraph=True, backend="aot_eager")
    graphs = []
    for shape in ((2, 8), (2, 8), (3, 12), (2, 10), (2, 8)):
        assert_trains_alike(plain, model, tokens(*shape))
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
def test_blocks_compiled_one_by_one(ranks, sequence_parallel):
    """All blocks share one graph; other sizes make one dynamic graph that further ones use."""
    for graphs in ranks(check_blocks, 2, sequence_parallel):
        assert graphs[0] == graphs[1] == 1
        assert graphs[2] == graphs[3] == graphs[4]
