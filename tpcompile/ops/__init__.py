"""Rules of the ATen ops, by family. Importing this package registers them all."""

from tpcompile.ops import (
    attention,
    conv,
    dropout,
    factories,
    indexing,
    losses,
    matmul,
    norms,
    pointwise,
    reductions,
    scans,
    slices,
    views,
)
from tpcompile.ops.replicated import REPLICATED, reason_for

__all__ = [
    "REPLICATED",
    "attention",
    "conv",
    "dropout",
    "factories",
    "indexing",
    "losses",
    "matmul",
    "norms",
    "pointwise",
    "reason_for",
    "reductions",
    "scans",
    "slices",
    "views",
]
