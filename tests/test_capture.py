"""Capture of unmodified models: structures, names, sizes that vary, and refusals in user terms."""

import copy
import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captured import Made, check_same, made, normalized, ops, rand, run
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tpcompile.capture import capture, flatten_inputs, unflatten_output
from tpcompile.errors import CaptureError, InputError
from tpcompile.program import Program
from tpcompile.size_check import size_check

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Result:
    """An output type that nobody registered."""

    loss: Any
    extra: Any = None
    steps: int = 3


@dataclasses.dataclass(frozen=True)
class Frozen:
    """One that cannot be assigned to."""

    loss: Any


def llama(**changes: Any) -> LlamaForCausalLM:
    """A Llama of two small layers."""
    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes | changes)).double()


def tokens(batch: int = 2, length: int = 8) -> torch.Tensor:
    """Token ids, none of them special."""
    return torch.arange(batch * length).reshape(batch, length) % 90 + 3


def holds(program: Program, tensors: list[torch.Tensor]) -> bool:
    """Whether a capture holds for these inputs."""
    return size_check(program)(*tensors)


OUTPUTS = {
    "dataclass": lambda m, x: Result(m.lin(x), [x, None, "text"], 7),
    "frozen": lambda m, x: Frozen(Pair(m.lin(x), m.lin.weight)),
    "input": lambda m, x: {"x": x, "y": m.lin(x), "again": x},
    "ordered": lambda m, x: OrderedDict(a=m.lin(x), b={"c": (m.lin(x).detach(),)}),
    "none": lambda m, x: None,
    "size": lambda m, x: (m.lin(x), x.shape[0]),
    "tensor": lambda m, x: m.lin(x),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_keep_their_type(name: str) -> None:
    """Any nest of containers, with what is not a tensor, comes back as it was."""
    check_same(made(OUTPUTS[name]), rand(3, 4))


def test_inputs_of_every_kind() -> None:
    """Positions, star arguments, keywords, nests, unused inputs and values that are no tensors."""

    def forward(m, x, *rest, scale=2.0, batch=None, unused=None, **more):
        y = m.lin(x) * scale + rest[0]["a"] + rest[1] + more["last"]
        return y + batch["text"].first.sum()

    program = check_same(
        made(forward),
        rand(3, 4),
        {"a": rand(3, 4)},
        rand(4),
        last=rand(3, 1),
        unused=rand(5),
        scale=3.5,
        batch={"text": Pair(rand(2, 2), "words")},
    )
    names = [program.leaves[node.name].name for node in program.placeholders("input")]
    assert names[:3] == ["args.0", "args.1.a", "args.2"]
    assert sorted(names[3:]) == ["batch.text.first", "last", "unused"]


class Named(nn.Module):
    """A forward with named arguments."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x, mask=None, *, scale=1.0):
        """Scale."""
        return self.lin(x) * scale


def test_one_key_for_one_call() -> None:
    """Position or keyword, defaults given or not: one key; what changes the graph changes it."""
    model, x = Named(), torch.ones(3, 4)
    _, key = flatten_inputs(model, (x,), {})
    same = [((), {"x": x}), ((x, None), {}), ((x + 1,), {"mask": None}), ((x[:2],), {})]
    for args, kwargs in same:
        assert flatten_inputs(model, args, kwargs)[1] == key
        assert hash(flatten_inputs(model, args, kwargs)[1]) == hash(key)
    other = [
        ((x, x), {}),
        ((x,), {"scale": 1}),
        ((x.double(),), {}),
        ((x[0],), {}),
        ((x.clone().requires_grad_(),), {}),
    ]
    for args, kwargs in other:
        assert flatten_inputs(model, args, kwargs)[1] != key
    with torch.autocast("cpu", torch.bfloat16):
        assert flatten_inputs(model, (x,), {})[1] != key


def test_an_argument_that_forward_does_not_take() -> None:
    """The signature is shown."""
    with pytest.raises(InputError) as error:
        capture(Named(), (torch.ones(3, 4),), {"labels": 1})
    assert str(error.value) == (
        "cannot call Named.forward(Tensor, labels=).\n"
        "  got an unexpected keyword argument 'labels'; "
        "its signature is forward(x, mask=None, *, scale=1.0).\n"
        "  fix: pass the arguments that forward takes, by position or by keyword."
    )


@pytest.mark.parametrize("make", [llama, lambda: llama(tie_word_embeddings=True)])
def test_llama(make: Any) -> None:
    """Same loss, logits, gradients and output class."""
    program = check_same(make(), input_ids=tokens(), labels=tokens(), use_cache=False)
    assert [program.leaves[n.name].name for n in program.placeholders("input")] == [
        "input_ids",
        "labels",
    ]
    assert set(program.symbols.values()) == {("tensors_0", 0), ("tensors_0", 1)}


def test_gpt2_in_training() -> None:
    """Tied weights are one placeholder; dropout draws what eager draws."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    config.bos_token_id = config.eos_token_id = 1
    model = GPT2LMHeadModel(config).double().train()
    program = check_same(model, input_ids=tokens(), labels=tokens(), use_cache=False, close=1e-10)
    tied = ("transformer.wte.weight", "lm_head.weight")
    assert program.aliases == {tied[0]: tied}
    names = [leaf.name for leaf in program.leaves.values()]
    assert names.count(tied[0]) == 1
    assert tied[1] not in names


def test_a_cache_in_the_output() -> None:
    """Objects that hold tensors are rebuilt around the new ones."""
    model = llama().eval()
    program = normalized(model, tokens())
    out = run(program, model, [tokens()])
    want = model(tokens())
    assert type(out.past_key_values) is type(want.past_key_values)
    for mine, theirs in zip(out.past_key_values.layers, want.past_key_values.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys)
        torch.testing.assert_close(mine.values, theirs.values)


def test_other_sizes() -> None:
    """A capture that holds for other sizes gives what the model gives there."""
    model = llama()
    program = normalized(model, input_ids=tokens(), labels=tokens(), use_cache=False)
    for shape in ((3, 8), (2, 13), (5, 4)):
        ids = tokens(*shape)
        assert holds(program, [ids, ids])
        out = run(program, model, [ids, ids])
        torch.testing.assert_close(out.loss, model(input_ids=ids, labels=ids).loss)
    for ids, labels in ((tokens(1, 8), tokens(1, 8)), (tokens(2, 8), tokens(2, 7))):
        assert not holds(program, [ids, labels])


def test_guards_limit_a_capture() -> None:
    """A branch on a size holds on its side of the branch only."""

    def forward(m, x):
        return m.lin(x) if x.shape[0] > 5 else m.lin(x) * 2

    program = normalized(made(forward), rand(7, 4))
    assert [str(g) for g in program.guards] == [f"{next(iter(program.symbols))} > 5"]
    sizes = {size: holds(program, [rand(size, 4)]) for size in (2, 5, 6, 90)}
    assert sizes == {2: False, 5: False, 6: True, 90: True}


def test_fixed_sizes() -> None:
    """Without dynamic dims, and for dims beyond the second, only equal sizes hold."""
    program = capture(made(lambda m, x: m.lin(x)), (rand(3, 2, 4),), {}, dynamic=False)
    assert program.symbols == {}
    assert holds(program, [rand(3, 2, 4)])
    assert not holds(program, [rand(4, 2, 4)])
    program = capture(made(lambda m, x: m.lin(x).sum(2)), (rand(3, 2, 6, 4),), {})
    assert holds(program, [rand(4, 5, 6, 4)])
    assert not holds(program, [rand(3, 2, 7, 4)])


def test_locations() -> None:
    """Each node knows its module, how often that was called before, and the line of the model."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Named()

        def forward(self, x):
            """Call the block twice."""
            x = self.block(x)
            return self.block(x)

    program = capture(Twice(), (torch.ones(3, 4),), {})
    line = Named.forward.__code__.co_firstlineno + 2
    assert [
        (node.meta["path"], node.meta["modules"], node.meta["calls"], node.meta["where"])
        for node in program.calls()
        if str(node.target) == "aten.linear.default"
    ] == [
        ("block.lin", ("", "block", "block.lin"), (0, 0, 0), f"test_capture.py:{line}"),
        ("block.lin", ("", "block", "block.lin"), (0, 1, 1), f"test_capture.py:{line}"),
    ]


def test_meta_parameters() -> None:
    """A model without memory is captured, in part on meta too; nothing of it is moved."""
    with torch.device("meta"):
        model = Named()
    assert ops(normalized(model, torch.ones(3, 4))) == ["linear", "add.Tensor", "mul.Tensor"]
    model = Named()
    bias = model.lin.bias
    model.lin.weight = nn.Parameter(torch.empty(4, 4, device="meta"))
    normalized(model, torch.ones(3, 4))
    assert model.lin.bias is bias


def test_the_model_is_left_as_it_was() -> None:
    """Modes, parameters, buffers, hooks and attributes; what forward sets is noted."""

    def forward(m, x):
        m.last = m.lin(x)
        m.lin.register_forward_hook(lambda *args: None)
        return m.last

    model = made(forward)
    model.lin.eval()
    before = copy.deepcopy(model.state_dict())
    tensors = [*model.parameters(), *model.buffers()]
    program = capture(model, (rand(3, 4),), {})
    assert program.notes == ["forward sets attributes that stay as they were: last"]
    assert not hasattr(model, "last")
    assert len(model.lin._forward_hooks) == 0
    assert (model.training, model.lin.training) == (True, False)
    assert all(
        a is b for a, b in zip(tensors, [*model.parameters(), *model.buffers()], strict=True)
    )
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_is_noted(reentrant: bool) -> None:
    """Gradients stay right; that activations are kept is said."""

    def forward(m, x):
        return checkpoint(m.lin, x, use_reentrant=reentrant)

    program = check_same(made(forward), rand(3, 4).requires_grad_())
    assert program.notes == [
        "torch.utils.checkpoint inside the model has no effect: gradients are the same, "
        "activations are kept; wrap the sharded blocks instead"
    ]


class Tripled(torch.autograd.Function):
    """A backward that is not the forward's, of a function that is not elementwise."""

    @staticmethod
    def forward(ctx, x):
        """Double, from the other end."""
        return x.flip(0) * 2

    @staticmethod
    def backward(ctx, grad):
        """Triple."""
        return grad.flip(0) * 3


def test_custom_autograd_functions_are_refused() -> None:
    """Their backward would be lost; only one that maps elements to elements is kept, as an op."""
    model = made(lambda m, x: Tripled.apply(m.lin(x)))
    with pytest.raises(CaptureError) as error:
        capture(model, (rand(3, 4),), {})
    asked, _, fix = str(error.value).split("\n")
    assert "custom autograd function Tripled" in asked
    assert fix.startswith("  fix: write Tripled with plain torch ops")
    Tripled.apply(torch.ones(2, requires_grad=True)).sum().backward()


def test_a_branch_on_values_is_refused() -> None:
    """The error names the line of the model."""

    class Branch(Made):
        def forward(self, x):
            """Branch on a value."""
            if x.sum() > 0:
                return self.lin(x)
            return x

    line = Branch.forward.__code__.co_firstlineno + 2
    with pytest.raises(CaptureError) as error:
        capture(Branch(None), (torch.ones(3, 4),), {})
    asked, found, fix = str(error.value).split("\n")
    assert asked == "cannot capture Branch into one graph."
    assert found.startswith(f"  test_capture.py:{line} in forward: if x.sum() > 0:: ")
    assert fix == (
        "  fix: replace Python control flow on tensor values by torch.where or masks, and sizes "
        "that depend on values by fixed ones."
    )


def test_a_model_that_fails_by_itself() -> None:
    """Its own error is shown with its line."""
    line = test_a_model_that_fails_by_itself.__code__.co_firstlineno + 2
    model = made(lambda m, x: m.lin(x) + x[:, 9])
    with pytest.raises(CaptureError) as error:
        capture(model, (rand(3, 4),), {})
    assert str(error.value) == (
        "cannot capture Made into one graph.\n"
        f"  test_capture.py:{line + 1} in <lambda>: model = made(lambda m, x: m.lin(x) + x[:, 9]): "
        "IndexError: index 9 is out of bounds for dimension 1 with size 4\n"
        "  fix: see that model(...) runs by itself on these inputs, and write this with plain "
        "torch ops."
    )


def test_unregistered_parameters_are_refused() -> None:
    """A parameter in a list would be a constant, and never get a gradient."""

    class Hidden(Made):
        def forward(self, x):
            """Use a hidden weight."""
            return x @ self.hidden[0]

    model = Hidden(None)
    model.hidden = [nn.Parameter(torch.ones(4, 4))]
    line = Hidden.forward.__code__.co_firstlineno + 2
    with pytest.raises(CaptureError) as error:
        capture(model, (torch.ones(3, 4),), {})
    assert str(error.value) == (
        "cannot capture a tensor [4, 4] that needs a gradient and is no parameter.\n"
        f"  test_capture.py:{line} in forward: return x @ self.hidden[0]: "
        "it is not in model.named_parameters() and not an input.\n"
        "  fix: register it: an nn.Parameter attribute, nn.ParameterList or register_parameter."
    )


def test_constants() -> None:
    """Tensors of the source and of plain attributes are leaves with a value."""
    table = torch.linspace(0, 1, 4, dtype=torch.float64)
    program = check_same(
        made(lambda m, x: m.lin(x) * table + torch.tensor([1.0, 2, 3, 4])), rand(3, 4)
    )
    values = [program.leaves[node.name].tensor for node in program.placeholders("constant")]
    assert [value.tolist() for value in values] == [table.tolist(), [1, 2, 3, 4]]


def test_frozen_parameters_and_input_gradients() -> None:
    """requires_grad is what it was."""
    model = made(lambda m, x: F.gelu(m.lin(x)))
    model.lin.weight.requires_grad_(False)
    program = check_same(model, rand(3, 4).requires_grad_())
    needs = {
        program.leaves[n.name].name: n.meta["val"].requires_grad for n in program.placeholders()
    }
    assert needs == {"lin.weight": False, "lin.bias": True, "buf": False, "args.0": True}


def test_the_structure_is_kept_apart_from_the_graph() -> None:
    """unflatten_output takes any values."""
    program = capture(made(lambda m, x: Result(m.lin(x))), (rand(3, 4),), {})
    assert unflatten_output(program.out_spec, ["anything"]) == Result("anything", None, 3)
