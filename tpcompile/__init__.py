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
from tpcompile.explain import Explanation, explain
from tpcompile.plan import Plan
from tpcompile.safetensors_files import load_safetensors
from tpcompile.sharded_module import blocks, graph_module
from tpcompile.sharding import shard
from tpcompile.stages import Stages, dump, stages
from tpcompile.state import full_state_dict, load_state_dict
from tpcompile.verification import Report, verify

__all__ = [
    "CaptureError",
    "CheckpointError",
    "Explanation",
    "InputError",
    "MeshError",
    "Plan",
    "RankMismatchError",
    "Report",
    "ShardingError",
    "Stages",
    "TpcompileError",
    "UnsupportedOpError",
    "blocks",
    "dump",
    "explain",
    "full_state_dict",
    "graph_module",
    "load_safetensors",
    "load_state_dict",
    "shard",
    "stages",
    "verify",
]
