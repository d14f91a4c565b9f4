"""Capture a sharded model again, for inputs or modes that no variant fits."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpcompile import pipeline
from tpcompile.agreement import agree, digest, meet
from tpcompile.caches import HEADS, Entries
from tpcompile.capture_inputs import bind_inputs
from tpcompile.emit import emit
from tpcompile.errors import CaptureError, InputError, TpcompileError
from tpcompile.generation import GENERATING
from tpcompile.pins import pins_from_layouts
from tpcompile.pipeline import OwnPasses
from tpcompile.planning import captured, check_rules
from tpcompile.program import Program
from tpcompile.runtime import Variant
from tpcompile.storage import ParamLayout
from tpcompile.structure import flatten, is_tensor, renew, take_apart


def twin_of(model: nn.Module) -> nn.Module | None:
    """A copy of the model without weights, for later captures; None where it cannot be copied."""
    stand_ins = {id(p): _weightless(p) for p in model.parameters()}
    try:
        return copy.deepcopy(model, stand_ins)
    except Exception:
        return None


def _weightless(parameter: Tensor, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A parameter of the same shape, strides and device that holds no memory."""
    bare = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    bare.untyped_storage().resize_(0)
    return nn.Parameter(bare, parameter.requires_grad)


@dataclass(frozen=True)
class Settings:
    """What a user asked for, and further captures keep to."""

    options: Mapping[str, Any]
    """Of `pipeline.plan`."""
    passes: OwnPasses | None
    strict: bool


class Recapture:
    """Captures, plans and emits again, parameters where they are; all ranks take part."""

    def __init__(
        self,
        model: nn.Module,
        twin: nn.Module | None,
        layouts: Mapping[str, ParamLayout],
        mesh: DeviceMesh,
        settings: Settings,
    ) -> None:
        """`twin` and `model` have the same modules now; users may wrap the model's later.

        `mesh` is the axis.
        """
        self.name, self.twin, self.layouts, self.mesh = type(model).__name__, twin, layouts, mesh
        self.group = mesh.get_group()
        self.axis = (self.group.group_name, mesh.size(), mesh.get_local_rank())
        self.settings = settings
        known: Entries | None = settings.options["caches"]
        self.caches: Entries = {} if known is None else known
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.pairs = [] if twin is None else list(zip(twin.modules(), model.modules(), strict=True))

    def inside(self, path: str) -> "Recapture":
        """The same for a module of the model."""
        prefix = f"{path}."
        layouts = {
            n.removeprefix(prefix): e for n, e in self.layouts.items() if n.startswith(prefix)
        }
        twin = None if self.twin is None else self.twin.get_submodule(path)
        whole = {**self.settings.options, "outputs": "replicated"}
        settings = replace(self.settings, options=whole)
        return Recapture(self.modules[path], twin, layouts, self.mesh, settings)

    def __call__(self, args: Any, kwargs: Any) -> Variant:
        """A variant for these inputs.

        Raises:
            RankMismatchError: The other ranks need none now, or one for other inputs.
        """
        args, kwargs = self._whole(args, kwargs)
        asked = f"call {self.name} with inputs of a new kind"
        meet(self.group, asked, self._text(args, kwargs))
        grads = torch.is_grad_enabled()
        # A checkpoint around the model would count what tracing saves.
        aside = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with torch.inference_mode(False), aside:
            args, kwargs = _normal(args, kwargs)
            program = agree(
                asked,
                lambda: self._plan(args, kwargs, grads),
                lambda program: {"plan": f";{digest(program)}"},
                lambda program: [program],
                self.group,
            )
            self.caches.update(program.extra["cache_entries"])
            pipeline.local(program, self.axis)
            pipeline.run(program, pipeline.EMIT)
            return emit(program, self.modules, self.mesh)

    def cut(self, caches: Sequence[Any]) -> bool:
        """Keep this rank's part of every tensor that is whole in a cache; whether one was."""
        found = False
        for cache in caches:
            flat = take_apart(cache, is_tensor)
            parts = [self._part(*each) for each in zip(flat.leaves, flat.entries, strict=True)]
            if any(part is not leaf for part, leaf in zip(parts, flat.leaves, strict=True)):
                renew(cache, flat.structure, iter(parts))
                found = True
        return found

    def _part(self, tensor: Tensor, path: str) -> Tensor:
        entry, (_, size, rank) = self.caches.get(path), self.axis
        if size == 1 or entry is None or tensor.shape[HEADS] != entry.size:
            return tensor
        return entry.part(tensor, size, rank)

    def _whole(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments, with empty tensors of the global shape for parts of caches."""
        flat = take_apart((args, kwargs), is_tensor)
        if not flat.caches:
            return args, kwargs
        _, size, rank = self.axis
        leaves: list[Tensor] = []
        for tensor, path in zip(flat.leaves, flat.entries, strict=True):
            entry, shape = self.caches.get(path), list(tensor.shape)
            if entry is not None and shape[HEADS] == entry.local_size(size, rank):
                shape[HEADS] = entry.size
            same = shape == list(tensor.shape)
            leaves.append(tensor if same else tensor.new_empty(shape))
        return flat.structure.unflatten(iter(leaves))

    def immutable(self) -> Iterator[Any]:
        """What copies of the model share; the twin has no weights that could be copied."""
        yield from (twin for twin, _ in self.pairs)
        yield self.group
        yield self.mesh
        yield self.layouts

    def _text(self, args: Any, kwargs: Any) -> str:
        """Names, types and shapes of the inputs' tensors."""
        tensors, _, names = bind_inputs(self.modules[""], args, kwargs)
        return ", ".join(
            f"{name} {str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
            for name, t in zip(names, tensors, strict=True)
        )

    def _plan(self, args: Any, kwargs: Any, grads: bool) -> Program:
        if self.twin is None:
            raise TpcompileError(
                f"{self.name} called with inputs of another structure",
                "the model could not be copied when it was sharded, so it cannot be traced again",
                "make it deepcopy-able, or pass example_inputs of this structure to shard",
            )
        for mine, theirs in self.pairs:
            _follow(mine, theirs)
        program = captured(self.twin, args, kwargs, passes=self.settings.passes)
        self._check_generating(program)
        pins = pins_from_layouts(self.layouts)
        options = dict(self.settings.options)
        if options["sequence_parallel"] == "auto" and not grads:
            options["sequence_parallel"] = False  # nothing is kept for a backward pass
        pipeline.plan(program, self.axis[1], pins=pins, **options)
        check_rules(program, strict=self.settings.strict)
        return program

    def _check_generating(self, program: Program) -> None:
        """Refuse to generate with state that a graph would not keep, or with logits in pieces."""
        if not GENERATING.get():
            return
        asked = f"generate with a sharded {self.name}"
        if self.settings.options["outputs"] == "sharded":
            fix = 'shard it with outputs="replicated", the default'
            raise InputError(asked, "its logits leave it as DTensors (outputs=)", fix)
        if program.extra["assigned"]:
            raise CaptureError(
                asked,
                f"its forward keeps state in attributes: {', '.join(program.extra['assigned'])}",
                "a graph keeps state in buffers and caches only; generate on one device",
            )


def _follow(mine: nn.Module, theirs: nn.Module) -> None:
    """Give a module of the twin the mode, types and gradients of the model's."""
    mine.training = theirs.training
    for attr, parameter in mine.named_parameters(recurse=False, remove_duplicate=False):
        wanted = theirs._parameters[attr]
        assert wanted is not None
        if parameter.dtype != wanted.dtype:
            parameter.data = _weightless(parameter, wanted.dtype).data
        parameter.requires_grad_(wanted.requires_grad)
    for attr, buffer in mine.named_buffers(recurse=False, remove_duplicate=False):
        wanted = theirs._buffers[attr]
        assert wanted is not None
        mine._buffers[attr] = buffer.to(wanted.dtype)


def _normal(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments, with copies of tensors that were made in inference mode."""
    tensors, structure, _ = flatten((args, kwargs), is_tensor)
    return structure.unflatten(t.clone() if t.is_inference() else t for t in tensors)
