"""What a state dict holds for a parameter whose storage is not in the original's order."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate

from tpcompile.errors import CheckpointError
from tpcompile.storage import ParamLayout
from tpcompile.torch_private import dtensor_as, pytree

aten = torch.ops.aten
_KEPT = {
    aten.detach.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.copy_.default,
    aten.empty_like.default,
    aten.new_empty.default,
}
"""Ops of saving and copying that mean the same on the stored part as on the original."""


class Stored(DTensor):
    """A DTensor with the original's shape, whose local part is this rank's part of the storage.

    Distributed checkpoints write and read it as slices of the original, so that they fit any
    degree.  The part's memory is the parameter's own.  Computing with it is an error:
    `full_tensor()` gives the original.
    """

    param_layout: ParamLayout
    tp_dim: int
    """Dim of the device mesh that is the tensor parallel axis."""

    @classmethod
    def of(cls, stored: DTensor, layout: ParamLayout, tp_dim: int) -> "Stored":
        """View a parameter (or optimizer state) in storage order."""
        with torch.no_grad():
            local = stored.to_local()
        return cls._wrap(local, stored.device_mesh, stored.placements, layout, tp_dim)

    @classmethod
    def _wrap(
        cls, local: Tensor, mesh: Any, placements: Any, layout: ParamLayout, tp_dim: int
    ) -> "Stored":
        shape = torch.Size(layout.shape)
        plain = _dtensor(local.detach(), mesh, placements, shape)
        view = dtensor_as(cls, plain)
        view.param_layout, view.tp_dim = layout, tp_dim
        return view

    def stored(self) -> DTensor:
        """The plain DTensor in storage order, on the same memory."""
        shape = torch.Size(self.param_layout.storage_shape())
        return _dtensor(self.part(), self.device_mesh, self.placements, shape)

    def part(self) -> Tensor:
        """This rank's part of the storage."""
        with torch.no_grad():
            return super().to_local()

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """Refuse: the local part is not the chunk of the original that the placements say."""
        raise _refused("to_local")

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The original. All ranks of the mesh take part."""
        with torch.no_grad():
            return self.param_layout.from_storage(self.stored().full_tensor())

    def redistribute(
        self, device_mesh: Any = None, placements: Any = None, **options: Any
    ) -> DTensor:
        """A plain DTensor of the original. All ranks of the mesh take part."""
        everywhere = [Replicate()] * self.device_mesh.ndim
        whole = DTensor.from_local(self.full_tensor(), self.device_mesh, everywhere)
        return whole.redistribute(device_mesh, placements, **options)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _KEPT:
            raise _refused(str(func))
        if func is aten.new_empty.default:
            if list(args[1]) != list(args[0].shape):
                raise _refused(str(func))
            args = (args[0], args[0].part().shape)
        parts = pytree.tree_map_only(Stored, Stored.part, (args, kwargs or {}))
        if not all(isinstance(each, Stored) for each in args if isinstance(each, Tensor)):
            raise _refused(str(func))
        out = func(*parts[0], **parts[1])
        if func is aten.copy_.default:
            return args[0]
        like = args[0]
        return cls._wrap(out, like.device_mesh, like.placements, like.param_layout, like.tp_dim)

    def _pieces(self) -> list[tuple[torch.Size, Tensor]]:
        """(offset in the original, memory) of every slice of the original that is stored here."""
        layout, part = self.param_layout, self.part()
        dim = layout.dim
        assert dim is not None
        first = self._window(layout.local_shape())
        pieces = []
        for run in layout.runs(self.device_mesh.get_local_rank(self.tp_dim)):
            begin = max(run.local, first[dim])
            end = min(run.local + run.length, first[dim] + part.shape[dim])
            offsets = list(first)
            offsets[dim] = run.original + begin - run.local
            if begin < end and part.numel():
                piece = part.narrow(dim, begin - first[dim], end - begin)
                pieces.append((torch.Size(offsets), piece))
        return pieces

    def _window(self, shape: tuple[int, ...]) -> list[int]:
        """Where `part` starts in the tensor parallel rank's part: fully_shard splits that again."""
        first = [0] * len(shape)
        for mesh_dim, placement in enumerate(self.placements):
            dim = getattr(placement, "dim", None)
            if mesh_dim != self.tp_dim and dim is not None:
                chunk = -(-shape[dim] // self.device_mesh.size(mesh_dim))
                first[dim] = min(shape[dim], chunk * self.device_mesh.get_local_rank(mesh_dim))
        return first

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """What a distributed checkpoint saves from here."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offsets, sizes=piece.shape),
                    properties=TensorProperties.create_from_tensor(piece),
                    size=self.size(),
                ),
            )
            for offsets, piece in self._pieces()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What a distributed checkpoint loads into."""
        return [
            ChunkStorageMetadata(offsets=offsets, sizes=piece.shape)
            for offsets, piece in self._pieces()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The memory of one slice."""
        return next(piece for offsets, piece in self._pieces() if offsets == index.offset)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Stored({list(self.shape)}, {self.param_layout})"


def _dtensor(local: Tensor, mesh: Any, placements: Any, shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _refused(what: str) -> CheckpointError:
    return CheckpointError(
        f"cannot apply {what} to a tensor of a sharded model's state dict.",
        "its storage is not in the original's order.",
        "call full_tensor() on it, or use the parameter of the model.",
    )


# So that torch.load(weights_only=True), the default, reads what torch.save wrote of a state dict.
torch.serialization.add_safe_globals([Stored, ParamLayout])
