"""Tensor parallelism for unmodified PyTorch models, by compilation."""

from tpcompile.errors import (
    CaptureError,
    CheckpointError,
    InputError,
    MeshError,
    RankMismatchError,
    ShardingError,
    TpcompileError,
    UnsupportedOpError,
)
from tpcompile.plan import Plan
from tpcompile.safetensors_files import load_safetensors
from tpcompile.sharding import shard
from tpcompile.state import full_state_dict, load_state_dict
from tpcompile.verification import Report, verify

__all__ = [
    "CaptureError",
    "CheckpointError",
    "InputError",
    "MeshError",
    "Plan",
    "RankMismatchError",
    "Report",
    "ShardingError",
    "TpcompileError",
    "UnsupportedOpError",
    "full_state_dict",
    "load_safetensors",
    "load_state_dict",
    "shard",
    "verify",
]
