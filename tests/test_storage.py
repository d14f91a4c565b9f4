"""Layouts of single parameters: every original element is stored once, padding is zero."""

import doctest
import json

import pytest
import torch

import tpcompile.storage
from tpcompile.layout import join, take
from tpcompile.storage import ParamLayout

LAYOUTS = {
    "replicated": ParamLayout.replicated((5, 3), 4),
    "identity": ParamLayout.sharded((8, 3), 0, ((1, 8, 1),), 4),
    "identity on dim 1": ParamLayout.sharded((3, 8), 1, ((1, 4, 2),), 2),
    "fused qkv": ParamLayout.sharded((24, 3), 0, ((1, 8, 2), (1, 2, 2), (1, 2, 2)), 2),
    "gate|up": ParamLayout.sharded((16, 3), 0, ((2, 8, 1),), 4),
    "gate|up on dim 1": ParamLayout.sharded((2, 12, 3), 1, ((3, 2, 2),), 2),
    "uneven": ParamLayout.sharded((7, 3), 0, ((1, 7, 1),), 4),
    "uneven heads": ParamLayout.sharded((20,), 0, ((1, 5, 4),), 3),
    "uneven gate|up": ParamLayout.sharded((10, 2), 0, ((2, 5, 1),), 4),
    "empty share": ParamLayout.sharded((6, 2), 0, ((1, 3, 2),), 4),
    "degree 1": ParamLayout.sharded((6, 2), 0, ((2, 3, 1),), 1),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())


@layouts
def test_parts_rejoin_to_the_original(layout):
    """to_local and from_locals, to_storage and from_storage undo each other bit for bit."""
    full = torch.randn(layout.shape)
    parts = [layout.to_local(full, rank) for rank in range(layout.size)]
    assert torch.equal(layout.from_locals(parts), full)
    storage = layout.to_storage(full)
    assert storage.shape == layout.storage_shape()
    assert torch.equal(layout.from_storage(storage), full)
    for part in parts:
        assert part.shape == layout.local_shape()
        assert part.is_contiguous()
        assert part.untyped_storage().data_ptr() != full.untyped_storage().data_ptr()


@layouts
def test_parts_are_what_the_graph_takes(layout):
    """A part without its padding is `layout.take` of the original; the padding is zero."""
    full = torch.randn(layout.shape)
    if layout.dim is None:
        return
    reals = []
    for rank in range(layout.size):
        length = layout.real_length(rank)
        real, padding = layout.to_local(full, rank).tensor_split([length], layout.dim)
        assert torch.equal(real, take(full, layout.dim, layout.segments, layout.size, rank))
        assert not padding.any()
        assert layout.is_padded(rank) == (padding.numel() > 0)
        reals.append(real)
    assert torch.equal(join(reals, layout.dim, layout.segments), full)


@layouts
def test_identity_is_the_original_in_even_chunks(layout):
    """is_identity says exactly whether storage and original are the same."""
    full = torch.arange(torch.Size(layout.shape).numel()).reshape(layout.shape)
    same = layout.storage_shape() == layout.shape and torch.equal(
        torch.cat([layout.to_local(full, r) for r in range(layout.size)], layout.dim)
        if layout.dim is not None
        else layout.to_local(full, 0),
        full,
    )
    assert layout.is_identity() == same


@layouts
def test_layouts_travel_as_json_and_work_on_meta(layout):
    """JSON gives the same layout back; meta tensors get shapes only."""
    assert ParamLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    meta = torch.empty(layout.shape, device="meta", dtype=torch.bfloat16)
    part = layout.to_local(meta, layout.size - 1)
    assert (part.device.type, part.dtype, part.shape) == (
        "meta",
        torch.bfloat16,
        layout.local_shape(),
    )
    assert layout.from_storage(layout.to_storage(meta)).shape == layout.shape


def test_doctests():
    """The examples in the module hold."""
    assert doctest.testmod(tpcompile.storage).failed == 0
