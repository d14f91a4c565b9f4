"""Every public call on a model that the torch.compile backend has sharded: right, or one error."""

import copy
import io
import pickle
from functools import partial

import compiled_models as cm
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from llama import assert_close, gradients, llama, loss_for, tokens
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import tpcompile
from tpcompile.errors import TpcompileError


def compiled(**options):
    """(plain, model, compiled model) after one call."""
    torch.compiler.reset()
    plain, model = llama(layers=1), llama(layers=1)
    call = torch.compile(model, backend=tpcompile.backend(cm.mesh(), inner="eager", **options))
    call(input_ids=tokens())
    return plain, model, call


def assert_alike(plain, call, length=8):
    """Losses and gradients of the two are equal."""
    ids = tokens(length=length)
    model = getattr(call, "_orig_mod", call)
    losses = []
    for each in (plain, call):
        each.zero_grad()
        losses.append(loss_for(each, ids))
        losses[-1].backward()
    assert_close(losses[1].detach(), losses[0].detach())
    assert_close(gradients(model), gradients(plain))


class Stack(nn.Module):
    """Blocks that are alike, each compiled by itself."""

    def __init__(self):
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))  # noqa: E731
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x):
        """[b, 8] -> [b, 8]."""
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


def check_blocks(hooks):
    """Blocks compiled one by one with one backend, in checkpoints, train as on one device."""
    torch.compiler.reset()
    torch.manual_seed(0)
    plain = Stack().double()
    model = copy.deepcopy(plain)
    backend = tpcompile.backend(cm.mesh(), inner="eager")
    for block in model.blocks:
        block.compile(backend=backend)
    for each in (plain, model) if hooks else ():
        each.blocks[1][0].register_forward_hook(lambda module, given, out: 2 * out)
    for step in range(2):
        x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        results = [each(x).square().sum() for each in (plain, model)]
        assert_close(results[1].detach(), results[0].detach())
        for result in results:
            result.backward()
        assert_close(gradients(model), gradients(plain))


@pytest.mark.parametrize("hooks", [False, True])
def test_blocks_that_are_alike(ranks, hooks):
    """Each runs with its own weights, though Dynamo makes one graph of them."""
    ranks(check_blocks, 2, hooks)


def check_lost_write():
    """A write to a weight that is gathered for Python is an error, not lost."""
    _, model, _ = compiled()
    head = model.lm_head
    run = type(head).forward

    def clamped(x):
        with torch.no_grad():
            head.weight.clamp_(-1, 1)
        return run(head, x)

    head.forward = clamped
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        model(input_ids=tokens())


def test_writes_outside_of_graphs(ranks):
    """They raise."""
    ranks(check_lost_write, 2)


def check_state():
    """State dicts of the model and of the compiled one, loading, clipping, printing."""
    plain, model, call = compiled()
    for each, prefix in ((model, ""), (call, "_orig_mod.")):
        state = each.state_dict()
        assert list(state) == [prefix + name for name in plain.state_dict()]
        assert_close({n: t.full_tensor() for n, t in state.items()}, each_named(plain, prefix))
        other = {n: 2 * t for n, t in each_named(plain, prefix).items()}
        each.load_state_dict(other)
        assert_close(tpcompile.full_state_dict(model), {**remove(other, prefix)})
        each.load_state_dict(each_named(plain, prefix))
        torch.save(each.state_dict(), io.BytesIO())
        assert_alike(plain, call)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 1e-3) for m in (plain, each)]
        assert_close(norms[1].full_tensor(), norms[0])
        assert_close(gradients(model), gradients(plain))
        each.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        assert "Linear(in_features=32" in repr(each)
    return True


def each_named(plain, prefix):
    """The plain model's state dict with a prefix."""
    return {prefix + name: value for name, value in plain.state_dict().items()}


def remove(state, prefix):
    """A state dict without the prefix."""
    return {name.removeprefix(prefix): value for name, value in state.items()}


def test_state_dicts_gradients_and_printing(ranks):
    """On the model, and through the object that torch.compile returns."""
    assert ranks(check_state, 2) == [True, True]


def check_refused():
    """Texts of the errors of what cannot be done."""
    _, model, call = compiled()
    texts = []
    for each in (model, call, model.model.layers[0]):
        for act in (copy.deepcopy, partial(torch.save, f=io.BytesIO()), pickle.dumps):
            with pytest.raises(TpcompileError) as caught:
                act(each)
            texts.append(str(caught.value))
    for act in (lambda: call.to("meta"), lambda: model.share_memory()):
        with pytest.raises(TpcompileError) as caught:
            act()
        texts.append(str(caught.value))
    model.lm_head.weight = nn.Parameter(torch.zeros(64, 32, dtype=torch.float64))
    with pytest.raises(TpcompileError) as caught:
        call(input_ids=tokens())
    return [*dict.fromkeys(texts), str(caught.value)]


def test_what_cannot_be_done_is_one_error(ranks):
    """Copies, pickles, other devices, shared memory, and parameters that are put in later."""
    found = (
        "it holds process groups and one rank's part of the weights, and its graphs are its own\n"
        "  fix: save tpcompile.full_state_dict(model), or model.state_dict() with "
        "torch.distributed.checkpoint; load it into a new model, and compile that"
    )
    moved = (
        "the tpcompile backend has sharded it over cpu devices\n"
        "  fix: move the model before its first compiled call"
    )
    assert ranks(check_refused, 2)[0] == [
        f"copy a model that the tpcompile backend has sharded\n  {found}",
        f"pickle a model that the tpcompile backend has sharded\n  {found}",
        f"move Embedding to meta\n  {moved}",
        f"move Embedding into shared memory\n  {moved}",
        "run a sharded model with a parameter of shape (64, 32) put in later.\n"
        "  it is no DTensor: it was assigned after shard\n"
        "  fix: change values in place, or with tpcompile.load_state_dict",
    ]


def check_uncompiled():
    """Calls beside the compiled one; the model in another dtype, and compiled twice."""
    plain, model, call = compiled()
    assert_alike(plain, model)
    x = torch.randn(2, 8, 32, dtype=torch.float64)
    assert_close(model.model.layers[0].mlp(x), plain.model.layers[0].mlp(x))
    with torch.inference_mode():
        assert_close(model(input_ids=tokens()).logits, plain(input_ids=tokens()).logits)
    again = torch.compile(model, backend=tpcompile.backend(cm.mesh(), inner="eager"))
    assert_alike(plain, again, length=9)
    model.float()
    assert call(input_ids=tokens()).logits.dtype == torch.float32
    model.double()
    assert_alike(plain, call)
    return True


def test_uncompiled_calls_and_other_dtypes(ranks):
    """The model and its parts, called by themselves, read their weights whole."""
    assert ranks(check_uncompiled, 2) == [True, True]


def check_checkpoint(folder):
    """A distributed checkpoint, loaded into a model that another backend has sharded."""
    plain, model, call = compiled()
    optimizer = torch.optim.AdamW(call.parameters(), lr=0.1)
    loss_for(call, tokens()).backward()
    optimizer.step()
    dcp.save(model.state_dict(), checkpoint_id=folder)
    saved = tpcompile.full_state_dict(model)
    _, other, _ = compiled(sequence_parallel=True)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state)
    assert_close(tpcompile.full_state_dict(other), saved)
    tpcompile.load_state_dict(other, plain.state_dict())
    assert_close(tpcompile.full_state_dict(other), dict(plain.state_dict()))
    return True


def test_checkpoints(ranks, tmp_path):
    """As after `shard`."""
    assert ranks(check_checkpoint, 2, str(tmp_path)) == [True, True]


def check_optimizers(early):
    """AdamW made before, with state, and carried over at once or at its next step."""
    torch.compiler.reset()
    example = cm.small("mlp")
    plain, model = example.model, copy.deepcopy(example.model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, model)]

    def step(*calls):
        for call, optimizer in zip(calls, optimizers, strict=True):
            optimizer.zero_grad()
            cm.loss_of(call(**example.inputs)).backward()
            optimizer.step()

    step(plain, model)
    optimizer = optimizers[1] if early else None
    backend = tpcompile.backend(cm.mesh(), inner="eager", model=model, optimizer=optimizer)
    call = torch.compile(model, backend=backend)
    for _ in range(2):
        step(plain, call)
    assert all(isinstance(p, DTensor) for p in optimizers[1].param_groups[0]["params"])
    assert set(backend.parameters()) == set(model.parameters())
    assert_close(tpcompile.full_state_dict(model), dict(plain.state_dict()), 1e-9)
    return True


@pytest.mark.parametrize("early", [True, False])
def test_an_optimizer_from_before_goes_on(ranks, early):
    """Its state is split like the parameters."""
    assert ranks(check_optimizers, 2, early) == [True, True]


def check_errors():
    """Texts of what is asked wrongly; the model is plain afterwards."""
    torch.compiler.reset()
    mesh, model = cm.mesh(), cm.small("mlp").model
    x = torch.ones(2, 8, 8, dtype=torch.float64)
    asks = [
        lambda: tpcompile.backend("cpu"),
        lambda: tpcompile.backend(mesh, axis="data"),
        lambda: tpcompile.backend(mesh, inner="nothing"),
        lambda: torch.compile(model, backend="tpcompile")(x),
        lambda: torch.compile(model, backend="tpcompile", options={"mesh": mesh, "tp": 2})(x),
        lambda: torch.compile(model, backend=tpcompile.backend(mesh, plan={"none": None}))(x),
    ]
    texts = []
    for ask in asks:
        with pytest.raises(TpcompileError) as caught:
            ask()
        texts.append(str(caught.value).partition("\n\n")[0])
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    return texts


def test_errors_come_before_anything_is_changed(ranks):
    """What was asked, what was found, how to fix it."""
    assert ranks(check_errors, 2)[0] == [
        "tpcompile.backend(mesh=str)\n  the mesh is not a DeviceMesh\n"
        '  fix: mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("tp",))',
        "compile a model over mesh axis 'data'\n  the mesh has axes 'tp'\n"
        '  fix: init_device_mesh(..., mesh_dim_names=("data",)), or pass axis= one of its names',
        "compile local graphs with inner='nothing'\n"
        "  it is no backend that compiles a graph for one device\n"
        '  fix: pass "inductor", "aot_eager", "eager" or another of '
        "torch.compiler.list_backends()",
        'torch.compile(model, backend="tpcompile", options={})\n  the options name no mesh\n'
        '  fix: options={"mesh": mesh}, and where wanted axis, inner, model, optimizer, '
        "sequence_parallel, plan, hardware, strict",
        "torch.compile(model, backend=\"tpcompile\", options={'mesh': ..., 'tp': ...})\n"
        "  there is no option 'tp'\n"
        '  fix: options={"mesh": mesh}, and where wanted axis, inner, model, optimizer, '
        "sequence_parallel, plan, hardware, strict",
        "plan= places 'none'.\n  no parameter of Small has that name.\n"
        "  fix: names look like 'up.weight'; * matches any part of a name",
    ]


def check_ranks_differ():
    """The error where one rank has other weights; and where it has another input length."""
    texts = []
    for seed, length in ((dist.get_rank(), 8), (0, 8 + dist.get_rank())):
        torch.compiler.reset()
        model = cm.small("mlp").model
        model.up.weight.data += seed
        call = torch.compile(model, backend=tpcompile.backend(cm.mesh(), inner="eager"))
        with pytest.raises(TpcompileError) as caught:
            call(torch.ones(2, length, 8, dtype=torch.float64))
        texts.append(str(caught.value).partition("\n\n")[0])
        assert not any(isinstance(p, DTensor) for p in model.parameters())
    return texts


def test_ranks_that_differ_are_one_error(ranks):
    """On every rank, before anything is placed."""
    for rank, texts in enumerate(ranks(check_ranks_differ, 2)):
        mine, other = f"float64[2, {8 + rank}, 8]", f"float64[2, {9 - rank}, 8]"
        assert texts == [
            "compile graph 0 of Small on all ranks of the axis\n"
            "  ranks 0 and 1 differ in parameter up.weight: other values\n"
            "  fix: seed all ranks alike (or load the same checkpoint) and give them the same "
            "inputs",
            "compile graph 0 of Small on all ranks of the axis\n"
            f"  rank {rank} has {mine}, rank {1 - rank} has {other}\n"
            "  fix: give all ranks of the axis inputs of the same structure and sizes at each step",
        ]
