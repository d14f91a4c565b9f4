"""Tensor parallelism for unmodified PyTorch models, by compilation."""

from tpcompile.advice import Advice
from tpcompile.advise import advise
from tpcompile.backend import Backend, backend
from tpcompile.calibrate import calibrate
from tpcompile.check_rule import check_rule
from tpcompile.errors import (
    CaptureError,
    CheckpointError,
    HardwareError,
    InputError,
    MeshError,
    RankMismatchError,
    RuleError,
    ShardingError,
    TpcompileError,
    UnsupportedOpError,
)
from tpcompile.explain import Explanation, explain
from tpcompile.hardware import Hardware, Link
from tpcompile.inductor import inductor_options
from tpcompile.micro_pipeline import micro_pipeline
from tpcompile.plan import Plan
from tpcompile.program import Program
from tpcompile.rule import Rule
from tpcompile.rule import rule as register_rule
from tpcompile.safetensors_files import load_safetensors
from tpcompile.sharded_module import blocks, graph_module, overlap
from tpcompile.sharding import shard
from tpcompile.stages import Stages, dump, stages
from tpcompile.state import full_state_dict, load_state_dict
from tpcompile.verification import Report, verify

__all__ = [
    "Advice",
    "Backend",
    "CaptureError",
    "CheckpointError",
    "Explanation",
    "Hardware",
    "HardwareError",
    "InputError",
    "Link",
    "MeshError",
    "Plan",
    "Program",
    "RankMismatchError",
    "Report",
    "Rule",
    "RuleError",
    "ShardingError",
    "Stages",
    "TpcompileError",
    "UnsupportedOpError",
    "advise",
    "backend",
    "blocks",
    "calibrate",
    "check_rule",
    "dump",
    "explain",
    "full_state_dict",
    "graph_module",
    "inductor_options",
    "load_safetensors",
    "load_state_dict",
    "micro_pipeline",
    "overlap",
    "register_rule",
    "shard",
    "stages",
    "verify",
]
