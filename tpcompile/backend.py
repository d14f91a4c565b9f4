"""A backend of torch.compile: Dynamo traces, and each graph that it hands over is sharded."""

import inspect
import os
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from tpcompile.backend_text import BackendExplanation
from tpcompile.errors import InputError, TpcompileError
from tpcompile.hardware import Hardware
from tpcompile.optimizer import watch_optimizers
from tpcompile.piece import Compiled
from tpcompile.piece_plan import Piece, Shared
from tpcompile.pins import PlanLike, sequence_parallel_for
from tpcompile.profiles import hardware_for
from tpcompile.sharding import axis_mesh
from tpcompile.torch_private import error_through_dynamo


class Backend:
    """What `tpcompile.backend` makes; one model is sharded by one of these."""

    def __init__(self, shared: Shared) -> None:
        """`tpcompile.backend` checks what a user passes."""
        self.shared = shared
        self.pieces: list[Piece] = []
        if shared.model is not None:
            shared.homes.append(shared.add(shared.model))
        watch_optimizers()

    @property
    def captures(self) -> int:
        """How many graphs Dynamo has handed over."""
        return len(self.pieces)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of the model: shards of what is sharded."""
        return chain.from_iterable(home.model.named_parameters() for home in self.shared.homes)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The model's parameters, for an optimizer: shards of what is sharded."""
        return (parameter for _, parameter in self.named_parameters())

    def explain(self) -> BackendExplanation:
        """The pieces, why each ends where it does, and their plans."""
        return BackendExplanation([piece.text() for piece in self.pieces])

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any], **kwargs: Any) -> Compiled:
        """What runs in the place of a graph; torch.compile calls this."""
        try:
            if kwargs:
                raise InputError(
                    f"torch.compile with {', '.join(f'{k}=' for k in kwargs)} and this backend",
                    "the backend has its options already",
                    "pass them to tpcompile.backend(mesh, ...)",
                )
            piece = Piece(self.shared, self.captures, gm, example_inputs)
        except TpcompileError as error:
            raise error_through_dynamo(error) from error.__cause__
        self.pieces.append(piece)
        return piece.run


def backend(
    mesh: DeviceMesh,
    *,
    axis: str = "tp",
    inner: str = "inductor",
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    sequence_parallel: bool | str = "auto",
    plan: PlanLike = None,
    hardware: Hardware | str | os.PathLike[str] | None = None,
    strict: bool = False,
) -> Backend:
    """A backend for `torch.compile(model, backend=...)` that shards what Dynamo traces.

    The first call of the compiled model shards its parameters, in the model itself: they are
    DTensors then, as after `shard`.

    Args:
        mesh: May have other axes (data, pipeline); they are left alone.
        axis: Name of the mesh axis to shard over.
        inner: The backend that compiles the local graphs: "inductor", "aot_eager", "eager", or
            any other that torch knows.
        model: The model that will be compiled; None: found by the parameters of its graphs.
        optimizer: An optimizer made earlier.  Without it one follows at its next step.
        sequence_parallel: As for `shard`.
        plan: As for `shard`.
        hardware: As for `shard`.
        strict: As for `shard`.

    Raises:
        TpcompileError: With what was asked, what was found and how to fix it.
    """
    call = f"tpcompile.backend(mesh={type(mesh).__name__})"
    submesh = axis_mesh(mesh, axis, call, "compile a model")
    if inner == "tpcompile" or inner not in torch.compiler.list_backends(exclude_tags=()):
        raise InputError(
            f"compile local graphs with inner={inner!r}",
            "it is no backend that compiles a graph for one device",
            'pass "inductor", "aot_eager", "eager" or another of torch.compiler.list_backends()',
        )
    options = {
        "sequence_parallel": sequence_parallel_for(sequence_parallel, plan),
        "hardware": hardware_for(hardware, mesh.device_type),
    }
    return Backend(Shared(submesh, inner, options, plan, strict, optimizer, model))


_NAMED: list[tuple[Any, Backend]] = []
"""(the `options` of a torch.compile, its backend); torch.compile hands over the same dict."""


def named_backend(
    gm: fx.GraphModule, example_inputs: list[Any], *, options: Any = None, **kwargs: Any
) -> Compiled:
    """The backend called "tpcompile": `torch.compile(model, backend="tpcompile", options=...)`.

    Raises:
        TpcompileError: The options are not those of `backend`.
    """
    found = next((made for known, made in _NAMED if known is options), None)
    if found is None:
        try:
            found = _from_options(options)
        except TpcompileError as error:
            raise error_through_dynamo(error) from error.__cause__
        _NAMED.append((options, found))
    return found(gm, example_inputs, **kwargs)


def _from_options(options: Any) -> Backend:
    known = list(inspect.signature(backend).parameters)
    given = dict(options or {})
    unknown = [name for name in given if name not in known]
    if unknown or "mesh" not in given:
        raise InputError(
            f'torch.compile(model, backend="tpcompile", options={_names(given)})',
            f"there is no option {', '.join(map(repr, unknown))}"
            if unknown
            else "the options name no mesh",
            f'options={{"mesh": mesh}}, and where wanted {", ".join(known[1:])}',
        )
    return backend(**given)


def _names(given: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{name!r}: ..." for name in given) + "}"
