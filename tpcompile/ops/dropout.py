"""Dropout: the mask is drawn as one device would draw it, each rank keeps its part."""

from typing import Any

from torch import ops, randn

from tpcompile import collectives
from tpcompile.ops.equations import Shaped, aten
from tpcompile.ops.pointwise import pointwise
from tpcompile.rule import Call, Rule, Split, rule


@rule(
    *aten("dropout"),
    samples=[
        lambda: (randn(4, 6), 0.5, True),
        lambda: (randn(4, 6), 0.5, False),
        lambda: (randn(2, 3, 4), 0.0, True),
    ],
)
def dropout(x: Shaped, p: float, train: bool) -> Rule:
    """x: [*b] -> [*b]. Not drawing, it is linear."""
    if not train or p == 0:
        return pointwise((x,), linear=((0,),))
    spec = pointwise((x,)).outs[0]

    def local(split: Split, x: Any, p: float, train: bool) -> Call:
        layout = split.layout(spec)
        if layout is None:
            return ops.aten.dropout.default, (x, p, train), {}
        return collectives.sharded_dropout, (x, p, split.axis, *layout), {}

    return pointwise((x,), local=local)
