"""Tensor, pipeline and data parallelism together: which layout fits, and which is fastest."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from tpcompile.degrees import USABLE, Degree
from tpcompile.hardware import Hardware

MICROBATCHES = 32
"""Micro-batches a pipeline runs in one step where the global batch is not given."""
_NEAR = 0.9
"""Share of the best throughput at which a layout with fewer pipeline stages is taken: they need a
schedule, and cut the model."""


@dataclass(frozen=True)
class Job:
    """What a layout is sought for."""

    hardware: Hardware
    memory: float
    """Bytes of one device."""
    blocks: int
    """Repeated blocks of the model, the units a pipeline is cut by."""
    batch: int
    """Samples of one micro-batch."""
    stream: float
    """Bytes of one block's output for one micro-batch."""
    global_batch: int | None = None
    """Samples of one optimizer step."""


@dataclass(frozen=True)
class Layout:
    """One way to use `gpus` devices. Ranks of one TP group are neighbours, then DP, then PP."""

    tp: int
    pp: int
    dp: int
    checkpoint: bool
    """Whether blocks are computed again in the backward pass to save memory."""
    memory: float
    """Bytes of the rank that needs most."""
    microbatches: int
    step: float
    """Seconds from one optimizer step to the next."""
    bubble: float
    """Share of the step in which a pipeline stage waits for work."""

    @property
    def gpus(self) -> int:
        """Devices in all."""
        return self.tp * self.pp * self.dp

    @property
    def samples_per_gpu(self) -> float:
        """Samples/s for each device, for micro-batches of one sample."""
        return self.microbatches * self.dp / self.step / self.gpus

    def __str__(self) -> str:
        again = ", blocks checkpointed" if self.checkpoint else ""
        return f"TP {self.tp} x PP {self.pp} x DP {self.dp}{again}"


def smallest_layout(degrees: Sequence[Degree], job: Job, gpus: int | None) -> Layout | None:
    """The fewest devices that hold one copy of the model, TP inside the node if that fits.

    How many micro-batches its pipeline will run depends on the replicas beside it: it is not asked.
    """
    alone = replace(job, global_batch=None)
    found = [each for each in _layouts(degrees, alone) if gpus is None or each.gpus <= gpus]
    inside = [each for each in found if not job.hardware.crosses(each.tp)]
    found = inside or found
    fewest = min((each.gpus for each in found), default=0)
    return _choose([each for each in found if each.gpus == fewest])


def best_layout(degrees: Sequence[Degree], job: Job, gpus: int) -> Layout | None:
    """The layout of exactly `gpus` devices that is nearly the fastest; None: none fits."""
    return _choose([each for each in _layouts(degrees, job, gpus) if each.gpus == gpus])


def _choose(found: Sequence[Layout]) -> Layout | None:
    """Of the layouts that are nearly the fastest, the one with fewest pipeline stages."""
    fast = max((each.samples_per_gpu for each in found), default=0.0)
    near = [each for each in found if each.samples_per_gpu >= _NEAR * fast]
    return min(near, key=lambda each: (each.pp, -each.samples_per_gpu), default=None)


def _layouts(degrees: Sequence[Degree], job: Job, gpus: int | None = None) -> Iterator[Layout]:
    """All that fit; without `gpus`, those of one data-parallel replica."""
    for degree in degrees:
        for pp in _stages(job.blocks):
            if gpus is None:
                # Nodes are used whole.
                if degree.size * pp > job.hardware.node and degree.size * pp % job.hardware.node:
                    continue
                copies = 1
            elif gpus % (degree.size * pp):
                continue
            else:
                copies = gpus // (degree.size * pp)
            for checkpoint in (False, True):
                layout = layout_for(degree, pp, copies, checkpoint, job)
                if layout is not None and layout.memory <= USABLE * job.memory:
                    yield layout
                    break


def _stages(blocks: int) -> list[int]:
    """Numbers of pipeline stages: powers of two and divisors."""
    return [
        n for n in range(1, max(blocks, 1) + 1) if n & (n - 1) == 0 or (blocks and blocks % n == 0)
    ]


def layout_for(degree: Degree, pp: int, dp: int, checkpoint: bool, job: Job) -> Layout | None:
    """One layout; None where the global batch has too few samples for its replicas.

    Pipelines run one forward, one backward (Narayanan et al. 2021, section 2.2): the first stage
    keeps the activations of `pp` micro-batches, and (pp - 1) / microbatches of the time is lost.
    """
    if job.global_batch is None:
        microbatches = MICROBATCHES
    elif job.global_batch < dp * job.batch:
        return None
    else:
        microbatches = ceil(job.global_batch / (dp * job.batch))
    times = degree.times
    again = times.block_compute / 3 + times.block_communication / 2 if checkpoint else 0.0
    per_block = (times.block_compute + times.block_communication + again) / max(job.blocks, 1)
    whole = times.step + again
    stage = whole if pp == 1 else max(whole / pp, ceil(whole / pp / per_block - 0.5) * per_block)
    send = 0.0 if pp == 1 else 2 * _transfer(degree, dp, job)
    steady = microbatches * (stage + send)
    bubble = (pp - 1) * (stage + send)
    step = steady + bubble + degree.optimizer_seconds / pp
    step += _gradients(degree, pp, dp, stage, job)
    return Layout(
        degree.size, pp, dp, checkpoint, _memory(degree, pp, microbatches, checkpoint, job),
        microbatches, step, bubble / step,
    )  # fmt: skip


def _memory(degree: Degree, pp: int, microbatches: int, checkpoint: bool, job: Job) -> float:
    """Bytes of the fullest stage: the first keeps most activations, the last has the loss."""
    outside_state = degree.state - degree.block_state
    outside_kept = degree.activations - degree.block_activations
    blocks = max(job.blocks, 1)
    share = ceil(job.blocks / pp) / blocks if pp > 1 else 1.0
    kept = degree.block_activations
    if checkpoint:
        # One block at a time has its activations again.
        kept = degree.block_inputs
        outside_kept += degree.block_activations / blocks
    flying = min(pp, microbatches)
    if pp == 1:
        return degree.state + kept + outside_kept
    # Embedding and head are at either end.
    ends = outside_state / 2
    state = max(degree.state / pp, share * degree.block_state + ends)
    working = degree.block_activations / blocks if checkpoint else 0.0
    return state + max(share * kept * flying + working, share * kept + outside_kept)


def _transfer(degree: Degree, dp: int, job: Job) -> float:
    """Seconds to hand a micro-batch to the next stage; scattered over the TP group."""
    ends = job.hardware.between if degree.size * dp >= job.hardware.node else None
    link = ends or job.hardware.inside
    return link.latency + job.stream / degree.size / link.bandwidth


def _gradients(degree: Degree, pp: int, dp: int, stage: float, job: Job) -> float:
    """Seconds of the gradient all-reduce over replicas beyond the backward pass it hides in."""
    if dp == 1:
        return 0.0
    sent = 2 * (dp - 1) / dp * degree.gradients / pp
    seconds = job.hardware.latency(dp, 2, degree.size)
    seconds += sent / job.hardware.bandwidth(dp, degree.size)
    return max(0.0, seconds - stage * 2 / 3)
