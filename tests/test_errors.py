"""Bad input is one TpcompileError that says what to do, on every rank, and changes nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import MLP
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import tpcompile
from tpcompile.errors import TpcompileError

X = torch.ones(2, 4, 8)


class Branch(MLP):
    """Takes a branch on a value."""

    def forward(self, x: Tensor) -> Tensor:
        """[*b, hidden] -> [*b, hidden]."""
        if x.sum() > 0:
            return super().forward(x)
        return x


class Unruly(MLP):
    """Uses an op without a rule."""

    def forward(self, x: Tensor) -> Tensor:
        """[*b, hidden] -> [*b, hidden]."""
        return torch.linalg.matrix_exp(super().forward(x) @ x.mT)


def mesh(axis: str = "tp") -> DeviceMesh:
    """All ranks as one axis."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(axis,))


def failure(model: nn.Module, *args: Any, **kwargs: Any) -> str:
    """The class and text of the one error of `shard`, which must leave the model as it was."""
    kind, forward = type(model), dict(model.__dict__)
    before = {n: (p, p.detach().clone()) for n, p in model.named_parameters()}
    try:
        tpcompile.shard(model, *args, **kwargs)
    except TpcompileError as error:
        text = f"{type(error).__name__}: {error}"
    else:
        return "no error"
    assert type(model) is kind
    assert model.__dict__ == forward
    assert list(before) == [n for n, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
    return text


def sharded() -> nn.Module:
    """A model that is sharded already."""
    return tpcompile.shard(MLP(), mesh(), X)


def _line_in(model: type[nn.Module]) -> int:
    """Number of the first line of code in a forward that has a docstring of one line."""
    return model.forward.__code__.co_firstlineno + 2


BRANCH = (
    f"test_errors.py:{_line_in(Branch)} in forward: if x.sum() > 0:: GuardOnDataDependentSymNode: "
    "Could not guard on data-dependent expression Eq(u0, 1) (unhinted: Eq(u0, 1)).  "
    "(Size-like symbols: none)"
)
CASES: dict[str, tuple[Callable[[], str], str]] = {
    "axis": (
        lambda: failure(MLP(), mesh("dp"), X),
        """\
MeshError: shard MLP over mesh axis 'tp'
  the mesh has axes 'dp'
  fix: init_device_mesh(..., mesh_dim_names=("tp",)), or pass axis= one of its names""",
    ),
    "unnamed axes": (
        lambda: failure(MLP(), init_device_mesh("cpu", (2,)), X),
        """\
MeshError: shard MLP over mesh axis 'tp'
  the mesh has no named axes
  fix: init_device_mesh(..., mesh_dim_names=("tp",)), or pass axis= one of its names""",
    ),
    "no mesh": (
        lambda: failure(MLP(), 2, X),
        """\
MeshError: shard(MLP, mesh=int)
  the mesh is not a DeviceMesh
  fix: mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("tp",))""",
    ),
    "device": (
        lambda: failure(
            MLP(), DeviceMesh("meta", [0, 1], mesh_dim_names=("tp",), _init_backend=False), X
        ),
        """\
MeshError: shard MLP over a mesh of meta devices
  the model is on cpu
  fix: model.to("meta") first, or make the mesh for the device it is on""",
    ),
    "sharded": (
        lambda: failure(tpcompile.shard(MLP(), mesh(), X), mesh(), X),
        """\
TpcompileError: shard MLP
  this model is sharded already
  fix: shard a model once; to change the degree, load full_state_dict into a new model""",
    ),
    "unknown argument": (
        lambda: failure(MLP(), mesh(), {"y": X}),
        """\
InputError: cannot call MLP.forward(y=).
  missing a required argument: 'x'; its signature is forward(x: torch.Tensor) -> torch.Tensor.
  fix: pass the arguments that forward takes, by position or by keyword.""",
    ),
    "too many arguments": (
        lambda: failure(MLP(), mesh(), (X, X)),
        """\
InputError: cannot call MLP.forward(Tensor, Tensor).
  too many positional arguments; its signature is forward(x: torch.Tensor) -> torch.Tensor.
  fix: pass the arguments that forward takes, by position or by keyword.""",
    ),
    "kind of inputs": (
        lambda: failure(MLP(), mesh(), 3),
        """\
InputError: example_inputs=int for MLP.forward
  it is neither a dict of keyword arguments, a tuple of positional ones, nor a tensor
  fix: pass what the forward takes, such as example_inputs={"x": torch.randn(2, 8, 32)}""",
    ),
    "no inputs": (
        lambda: failure(MLP(), mesh()),
        """\
InputError: cannot make example inputs for MLP.
  it has no Hugging Face config; its signature is forward(x: torch.Tensor) -> torch.Tensor.
  fix: pass example_inputs=, the arguments of one call: a dict of keywords or a tuple.""",
    ),
    "wrong shape": (
        lambda: failure(MLP(), mesh(), torch.ones(2, 7)),
        f"""\
CaptureError: cannot capture MLP into one graph.
  models.py:{_line_in(MLP)} in forward: return self.down(F.gelu(self.up(x))): RuntimeError: \
a and b must have same reduction dim, but got [2, 7] X [8, 12].
  fix: see that model(...) runs by itself on these inputs, and write this with plain torch ops.""",
    ),
    "branch": (
        lambda: failure(Branch(), mesh(), X),
        f"""\
CaptureError: cannot capture Branch into one graph.
  {BRANCH}
  fix: replace Python control flow on tensor values by torch.where or masks, and sizes that \
depend on values by fixed ones.""",
    ),
    "plan names nothing": (
        lambda: failure(MLP(), mesh(), X, plan={"left.weight": Shard(0)}),
        """\
ShardingError: plan= places 'left.weight'.
  no parameter of MLP has that name.
  fix: names look like 'up.weight'; * matches any part of a name""",
    ),
    "plan is no placement": (
        lambda: failure(MLP(), mesh(), X, plan={"up.weight": Partial()}),
        """\
ShardingError: plan= places 'up.weight' as Partial(sum).
  a parameter can be Shard(dim) or Replicate().
  fix: use one of torch.distributed.tensor's Shard and Replicate""",
    ),
    "plan has no such dim": (
        lambda: failure(MLP(), mesh(), X, plan={"up.bias": Shard(1)}),
        """\
ShardingError: plan= asks for 'up.bias' as Shard(1) on 2 ranks.
  it is [12], which has 1 dims.
  fix: use a degree that divides it, or drop it from plan= and let tpcompile choose""",
    ),
    "plan cannot be met": (
        lambda: failure(MLP(8, 1), mesh(), X, plan={"up.weight": Shard(0)}),
        """\
ShardingError: plan= asks for 'up.weight' as Shard(0) on 2 ranks.
  it is [1, 8]; it has one element.
  fix: use a degree that divides it, or drop it from plan= and let tpcompile choose""",
    ),
    "strict": (
        lambda: failure(Unruly(), mesh(), X, strict=True),
        """\
UnsupportedOpError: strict=True asks that every op has a sharding rule
  there is none for aten.linalg_matrix_exp.default in the root
  fix: register a rule (tpcompile.register_rule), or drop strict=True to replicate them""",
    ),
    "sequence parallel": (
        lambda: failure(MLP(), mesh(), X, sequence_parallel="yes"),
        """\
InputError: sequence_parallel='yes'
  it says neither yes nor no
  fix: pass True, False, or "auto" to let the cost decide""",
    ),
}
"""Name -> (what fails on every rank, class and whole text of the error)."""


def text_of(case: str) -> str:
    """What a case says; called on every rank."""
    return CASES[case][0]()


@pytest.mark.parametrize("case", CASES)
def test_bad_input(ranks: Callable, case: str) -> None:
    """One error with the same whole text on every rank; the model is as it was."""
    assert ranks(text_of, 2, case) == [CASES[case][1]] * 2


def _other_value() -> nn.Module:
    torch.manual_seed(0)
    model = MLP()
    with torch.no_grad():
        model.down.bias[3] += dist.get_rank()
    return model


def _other_mode() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    return model.train(dist.get_rank() == 0)


def _other_seed() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    torch.manual_seed(dist.get_rank())
    return model


def _other_error() -> nn.Module:
    return Branch() if dist.get_rank() else MLP()


def _same(ffn: int = 12) -> nn.Module:
    torch.manual_seed(0)
    return MLP(8, ffn)


def _mismatch(model: str, found: str) -> str:
    return f"""\
RankMismatchError: shard {model} on all ranks of the axis
  ranks 0 and 1 differ in {found}
  fix: seed all ranks alike (or load the same checkpoint) and give them the same inputs"""


DIFFERENT: dict[str, tuple[Callable[[], str], str]] = {
    "value": (
        lambda: failure(_other_value(), mesh(), X),
        _mismatch("MLP", "parameter down.bias: other values"),
    ),
    "shape": (
        lambda: failure(MLP(8, 12 + 2 * dist.get_rank()), mesh(), X),
        _mismatch("MLP", "parameter up.weight: (12, 8) torch.float32 and (14, 8) torch.float32"),
    ),
    "mode": (
        lambda: failure(_other_mode(), mesh(), X),
        _mismatch("Sequential", "mode: train and eval"),
    ),
    "input shape": (
        lambda: failure(_same(), mesh(), torch.ones(2 + dist.get_rank(), 4, 8)),
        _mismatch("MLP", "example input x: (2, 4, 8) torch.float32 and (3, 4, 8) torch.float32"),
    ),
    "input value": (
        lambda: failure(_same(), mesh(), X + dist.get_rank()),
        _mismatch("MLP", "example input x: other values"),
    ),
    "seed": (
        lambda: failure(_other_seed(), mesh(), X),
        _mismatch("Sequential", "random seed: seed 0 and seed 1"),
    ),
    "plan": (
        lambda: failure(
            _same(ffn=4096), mesh(), X, plan=[{"up.*": Replicate()}, None][dist.get_rank()]
        ),
        _mismatch("MLP", "plan: other values"),
    ),
    "one fails": (
        lambda: failure(_other_error(), mesh(), X),
        f"""\
TpcompileError: shard MLP
  rank 1 of the axis failed: cannot capture Branch into one graph. {BRANCH}
  fix: on rank 1: replace Python control flow on tensor values by torch.where or masks, and \
sizes that depend on values by fixed ones.""",
    ),
}
"""Name -> (what differs between two ranks, class and whole text of rank 0's error)."""


def text_of_difference(case: str) -> str:
    """What a case of different ranks says; called on every rank."""
    return DIFFERENT[case][0]()


@pytest.mark.parametrize("case", DIFFERENT)
def test_ranks_that_differ(ranks: Callable, case: str) -> None:
    """Every rank raises, none hangs, and the text names the first thing that differs."""
    first, _ = ranks(text_of_difference, 2, case)
    assert first == DIFFERENT[case][1]
