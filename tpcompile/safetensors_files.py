"""Load a sharded model from a folder of safetensors files, reading only this rank's slices."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpcompile.errors import CheckpointError
from tpcompile.parameters import Slot, renew, slots
from tpcompile.state import check_shape, required, some
from tpcompile.storage import ParamLayout
from tpcompile.stored import copy_full, from_local


def load_safetensors(model: nn.Module, folder: str | Path) -> list[str]:
    """Load parameters and persistent buffers from `model.safetensors` or its sharded form.

    Reads one slice at a time and never the whole checkpoint.  Parameters on meta are made real
    (they become new objects: make the optimizer afterwards).  A tied parameter needs only one of
    its names in the files.  No traffic.

    Args:
        model: A sharded model.
        folder: As `save_pretrained` of Hugging Face writes it.

    Returns:
        Names in the files that the model does not have.

    Raises:
        CheckpointError: the folder has no such files, or names or shapes differ; nothing is
            changed.
    """
    required(model)
    with ExitStack() as stack:
        files = _Files(Path(folder), stack)
        parameters = list(_named(slots(model), files))
        buffers = _persistent_buffers(model)
        absent = [name for name in buffers if name not in files.where]
        _check(model, files, parameters, absent)
        for name, buffer in buffers.items():
            check_shape(name, files.part(name), tuple(buffer.shape))
        for name, places in parameters:
            _load(model, name, places, files)
        for name, buffer in buffers.items():
            buffer.copy_(files.whole(name))
        known = {name for name, _ in model.named_parameters(remove_duplicate=False)} | set(buffers)
        return sorted(set(files.where) - known)


class _Files:
    """The safetensors files of a folder, opened as they are needed."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        from safetensors import safe_open

        self._open = lambda path: stack.enter_context(safe_open(path, framework="pt"))
        self._handles: dict[Path, Any] = {}
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.exists():
            names = json.loads(index.read_text())["weight_map"]
            self.where = {name: folder / file for name, file in names.items()}
        elif single.exists():
            self.where = dict.fromkeys(self._handle(single).keys(), single)
        else:
            raise CheckpointError(
                f"cannot load safetensors from {folder}.",
                f"it has neither {single.name} nor {index.name}.",
                "give the folder that save_pretrained wrote (safetensors, not .bin files).",
            )

    def part(self, name: str) -> Any:
        """A lazy tensor: indexing it reads."""
        return _Lazy(self._handle(self.where[name]).get_slice(name))

    def whole(self, name: str) -> Tensor:
        """The whole tensor."""
        return self._handle(self.where[name]).get_tensor(name)

    def _handle(self, path: Path) -> Any:
        if path not in self._handles:
            self._handles[path] = self._open(path)
        return self._handles[path]


class _Lazy:
    def __init__(self, slices: Any) -> None:
        self.slices, self.shape = slices, tuple(slices.get_shape())

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        index = [slice(None)] * len(self.shape)
        index[dim] = slice(start, start + length)
        return self.slices[tuple(index)]


def _named(found: Iterator[list[Slot]], files: _Files) -> Iterator[tuple[str, list[Slot]]]:
    """(the name that the files use, places) of each parameter; its first name if none is there."""
    for places in found:
        names = [slot.name for slot in places]
        yield next((name for name in names if name in files.where), names[0]), places


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    state = model.state_dict(keep_vars=True)
    return {k: v for k, v in state.items() if k not in parameters and isinstance(v, Tensor)}


def _check(
    model: nn.Module, files: _Files, parameters: list[tuple[str, list[Slot]]], absent: list[str]
) -> None:
    layouts = required(model).layouts
    absent = [name for name, _ in parameters if name not in files.where] + absent
    if absent:
        raise CheckpointError(
            f"cannot load the safetensors files into {type(model).__name__}.",
            f"missing: {some(absent)}.",
            "load the weights with from_pretrained first and shard the model then.",
        )
    meta = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if meta:
        raise CheckpointError(
            f"cannot load the safetensors files into {type(model).__name__}.",
            f"these buffers are on meta: {some(meta)}.",
            "make only the parameters on meta; buffers are computed when the model is made.",
        )
    for name, _ in parameters:
        check_shape(name, files.part(name), layouts[name].shape)


def _load(model: nn.Module, name: str, places: list[Slot], files: _Files) -> None:
    sharded = required(model)
    layout, mesh = sharded.layouts[name], sharded.mesh
    old = getattr(places[0].module, places[0].attr)
    stored: DTensor = old.detach()
    if stored.device_mesh.ndim > 1:  # fully_shard has split the parts again
        copy_full(stored, files.whole(name), layout)
    elif stored.is_meta:
        local = torch.zeros(layout.local_shape(), dtype=stored.dtype, device=mesh.device_type)
        _read(local, name, layout, mesh.get_local_rank(), files)
        renew(old, from_local(local, layout, mesh), places)
    else:
        _read(stored.to_local(), name, layout, mesh.get_local_rank(), files)


def _read(local: Tensor, name: str, layout: ParamLayout, rank: int, files: _Files) -> None:
    if layout.dim is None:
        local.copy_(files.whole(name))
        return
    part = files.part(name)
    for run in layout.runs(rank):
        piece = part.narrow(layout.dim, run.original, run.length)
        local.narrow(layout.dim, run.local, run.length).copy_(piece)
