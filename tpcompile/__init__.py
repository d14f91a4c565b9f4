"""Tensor parallelism for unmodified PyTorch models, by compilation."""

from tpcompile.advice import Advice
from tpcompile.advise import advise
from tpcompile.calibrate import calibrate
from tpcompile.errors import (
    CaptureError,
    CheckpointError,
    HardwareError,
    InputError,
    MeshError,
    RankMismatchError,
    ShardingError,
    TpcompileError,
    UnsupportedOpError,
)
from tpcompile.explain import Explanation, explain
from tpcompile.hardware import Hardware, Link
from tpcompile.plan import Plan
from tpcompile.safetensors_files import load_safetensors
from tpcompile.sharded_module import blocks, graph_module
from tpcompile.sharding import shard
from tpcompile.stages import Stages, dump, stages
from tpcompile.state import full_state_dict, load_state_dict
from tpcompile.verification import Report, verify

__all__ = [
    "Advice",
    "CaptureError",
    "CheckpointError",
    "Explanation",
    "Hardware",
    "HardwareError",
    "InputError",
    "Link",
    "MeshError",
    "Plan",
    "RankMismatchError",
    "Report",
    "ShardingError",
    "Stages",
    "TpcompileError",
    "UnsupportedOpError",
    "advise",
    "blocks",
    "calibrate",
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
