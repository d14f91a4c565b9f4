"""Options of torch.compile that let Inductor schedule, bucket and fuse a model's collectives."""

from typing import Any

import torch
from torch import nn

from tpcompile.errors import TpcompileError
from tpcompile.parameters import sharded_for

_ON_GPU = {
    "aten_distributed_optimizations.enable_overlap_scheduling": True,
    "aten_distributed_optimizations.collective_bucketing": True,
    "aten_distributed_optimizations.insert_overlap_deps": True,
}
"""Works on the graph, and asks Triton how fast the device is."""
_ANYWHERE = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": [
        "reorder_communication_preserving_peak_memory",
        "sink_waits_iterative",
        "reorder_communication_preserving_peak_memory",
    ],
}
"""Works on Inductor's schedule; the order of passes is the one that its configuration gives."""


def inductor_options(model: nn.Module, *, micro_pipeline: bool | None = None) -> dict[str, Any]:
    """`torch.compile(model, options=tpcompile.inductor_options(model))` of a sharded model.

    Inductor then moves collectives apart from their waits, and on GPUs joins small ones.  With
    `micro_pipeline` it fuses all-gathers and reduce-scatters with the matmuls next to them where
    its matcher takes them (see `tpcompile.micro_pipeline`), which needs GPUs with symmetric
    memory; None: where there are GPUs.

    Raises:
        TpcompileError: The model is not sharded, or has no GPU to pipeline on.
    """
    sharded = sharded_for(model)
    if sharded is None:
        raise TpcompileError(
            f"inductor_options({type(model).__name__})",
            "the model is not sharded",
            "shard it first: only then are there collectives",
        )
    on_gpu = sharded.mesh.device_type == "cuda" and torch.cuda.is_available()
    if micro_pipeline and not on_gpu:
        raise TpcompileError(
            f"inductor_options({type(model).__name__}, micro_pipeline=True)",
            f"the mesh is of {sharded.mesh.device_type} devices, which have no symmetric memory",
            "leave it out; tpcompile.micro_pipeline(model) says what GPUs would fuse",
        )
    if not on_gpu:
        return dict(_ANYWHERE)
    return {**_ON_GPU, **({} if micro_pipeline is False else {"_micro_pipeline_tp": True})}
