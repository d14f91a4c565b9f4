"""Models for tests of the torch.compile backend, and what tests compare of two of them."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import models
import torch
import torch.distributed as dist
from llama import assert_close, gradients
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tpcompile


class Doubled(torch.autograd.Function):
    """A ReLU whose backward is not autograd's: twice the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """[*b] -> [*b]."""
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Its own."""
        (x,) = ctx.saved_tensors
        return 2 * grad * (x > 0)


class Summed(torch.autograd.Function):
    """A cumulative sum whose backward is not autograd's, and that maps no elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        return x.cumsum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Its own."""
        return 3 * grad


class Small(nn.Module):
    """Two linear layers around what `call` does; one that only Python reads, one that nothing."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.call = call
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.plain = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.unread = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Any:
        """[b, s, 8] -> [b, s, 8], in most."""
        return getattr(self, self.call)(x)

    def mlp(self, x: Tensor) -> Tensor:
        """Nothing else."""
        return self.down(self.up(x).relu())

    def breaks(self, x: Tensor) -> Tensor:
        """Three graphs, the last of which reads no parameter and a size of the first."""
        n, y = x.shape[1], self.up(x).relu()
        torch._dynamo.graph_break()
        y = self.down(y)
        torch._dynamo.graph_break()
        return y[:, : n // 2] * n

    def sizes(self, x: Tensor) -> Tensor:
        """A graph that reads a size of which it has no tensor, and one that gives a size."""
        n, y = 2 * x.shape[1], self.up(x).relu().sum(1)
        torch._dynamo.graph_break()
        return self.down(y) * n

    def python(self, x: Tensor) -> Tensor:
        """A layer that Dynamo may not see, between two that it does."""
        return self.down(self.up(torch.compiler.disable(self.plain)(x)).relu())

    def no_grad(self, x: Tensor) -> Tensor:
        """A weight that is trained in one of its two uses."""
        with torch.no_grad():
            gate = self.up(x)
        return self.down(self.up(x) * gate) * x.shape[1]

    def autocast(self, x: Tensor) -> Tensor:
        """A region of autocast with one without inside."""
        with torch.autocast("cpu", torch.bfloat16):
            y = self.up(x)
            with torch.autocast("cpu", enabled=False):
                return self.down(y.to(self.down.weight.dtype))

    def checkpoint(self, x: Tensor) -> Tensor:
        """Activations that are computed twice."""
        return torch.utils.checkpoint.checkpoint(self.mlp, x, use_reentrant=False)

    def elementwise(self, x: Tensor) -> Tensor:
        """A custom autograd function that maps elements."""
        return self.down(Doubled.apply(self.up(x)))

    def custom(self, x: Tensor) -> Tensor:
        """A custom autograd function of any kind."""
        return self.down(Summed.apply(self.up(x)))

    def statistics(self, x: Tensor) -> Tensor:
        """Running statistics."""
        return self.norm(self.mlp(x).flatten(0, 1)).view(x.shape)

    def in_place(self, x: Tensor) -> Tensor:
        """Writes into what it computed."""
        y = self.up(x)
        y[:, 0] = 0
        return self.down(y.mul_(2))

    def structure(self, x: Tensor) -> dict[str, Any]:
        """An input, a number and None beside the result."""
        return {"y": self.mlp(x), "x": x, "n": 2 * x.shape[1], "none": None}

    def later(self, x: Tensor) -> Tensor:
        """In evaluation it reads what nothing reads in training."""
        y = self.mlp(x)
        return y if self.training else y + self.unread(x.repeat(1, 1, 4)).sum(-1, keepdim=True)


def small(call: str) -> models.Example:
    """A `Small` in float64."""
    torch.manual_seed(0)
    x = torch.randn(2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return models.Example(models.scrambled(Small(call)), {"x": x}, single=call == "autocast")


def hf(name: str, **config: Any) -> models.Example:
    """A small Hugging Face model of `models` with labels, in training."""
    example = getattr(models, name)(**config)
    return models.Example(example.model.train(), example.inputs, single=True)


def t5() -> models.Example:
    """An encoder and a decoder with relative positions and a tied embedding."""
    import transformers

    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=models.VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    model = models.scrambled(transformers.T5ForConditionalGeneration(config))
    ids = models.token_ids()
    return models.Example(model, {"input_ids": ids, "labels": ids.flip(1)}, single=True)


def encoder() -> models.Example:
    """Torch's own transformer layers."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
    model = models.scrambled(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    return models.Example(model, {"src": torch.randn(2, 8, 32, dtype=torch.float64)})


def mesh() -> DeviceMesh:
    """All ranks on one axis."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def loss_of(output: Any) -> Tensor:
    """The model's own loss, or a weighted sum in which every element counts."""
    if isinstance(output, Tensor):
        weights = torch.arange(output.numel(), dtype=output.dtype).cos()
        return (output.flatten() * weights).sum()
    if isinstance(output, dict) and "y" in output:
        return loss_of(output["y"]) * output["n"] + output["x"].sum()
    return output.loss


@dataclass
class Pair:
    """A plain model and a compiled one that started equal."""

    plain: nn.Module
    model: nn.Module
    call: Callable[..., Any]
    backend: tpcompile.Backend
    tolerance: float
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)

    @classmethod
    def of(cls, example: models.Example, tolerance: float = 1e-11, **options: Any) -> "Pair":
        """The example's model, twice; `options` are the backend's."""
        torch.compiler.reset()
        plain = example.model
        model = copy.deepcopy(plain)
        backend = tpcompile.backend(mesh(), **{"inner": "eager", **options})
        call = torch.compile(model, backend=backend)
        pair = cls(plain, model, call, backend, 1e-5 if example.single else tolerance)
        pair.optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
        return pair

    def step(self, inputs: dict[str, Any]) -> None:
        """Losses, all gradients and the parameters after a step of AdamW are equal."""
        losses = []
        for call in (self.plain, self.call):
            torch.manual_seed(3)
            losses.append(loss_of(call(**inputs)))
            losses[-1].backward()
        self.assert_close(losses[1].detach(), losses[0].detach())
        found, wanted = gradients(self.model), gradients(self.plain)
        assert {n for n, g in found.items() if g is None} == {
            n for n, g in wanted.items() if g is None
        }
        self.assert_close(found, wanted)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state = tpcompile.full_state_dict(self.model)
        self.assert_close(state, dict(self.plain.state_dict()), 1e3)

    def assert_close(self, found: Any, wanted: Any, factor: float = 1.0) -> None:
        """Equal up to the order of sums, or to float32 where the model computes in it."""
        assert_close(found, wanted, self.tolerance * factor)

    def evaluate(self, inputs: dict[str, Any]) -> None:
        """Outputs are equal in evaluation mode, without gradients."""
        self.plain.eval(), self.model.eval()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                self.assert_close(loss_of(self.call(**inputs)), loss_of(self.plain(**inputs)), 1e3)


def cut(inputs: dict[str, Any], length: int) -> dict[str, Any]:
    """The inputs with other sequences: shorter, or longer by repetition."""
    return {
        name: torch.cat([v] * (length // v.shape[1] + 1), 1)[:, :length].contiguous()
        if isinstance(v, Tensor)
        else v
        for name, v in inputs.items()
    }
