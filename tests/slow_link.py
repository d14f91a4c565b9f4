"""A link that is slow on purpose, in real time or in counted time."""

import time
from contextlib import contextmanager

import torch

from tpcompile import wire
from tpcompile.torch_private import TorchDispatchMode, pytree

aten = torch.ops.aten
MATMULS = (aten.mm.default, aten.mm.out, aten.addmm.default, aten.addmm_.default, aten.bmm.default)


class Real:
    """Wall time."""

    now = staticmethod(time.perf_counter)

    def until(self, then):
        """Sleep."""
        time.sleep(max(0.0, then - self.now()))


class Counted(TorchDispatchMode):
    """Time that passes by multiplying only: as many seconds as multiply-adds."""

    def __init__(self):
        super().__init__()
        self.time = 0.0

    def now(self):
        """Seconds since the start."""
        return self.time

    def until(self, then):
        """Let the time pass."""
        self.time = max(self.time, then)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count, then run."""
        if func in MATMULS:
            a, b = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)][-2:]
            self.time += a.numel() * b.shape[-1]
        return func(*args, **(kwargs or {}))


class Log:
    """What the link did."""

    def __init__(self):
        self.count, self.sent, self.waited = 0, 0.0, 0.0


@contextmanager
def slow_link(clock, seconds, blocking=False):
    """Collectives take `seconds(elements of the result)` each, one after the other.

    With `blocking`, each is waited for where it starts.  Yields a `Log`.
    """
    log, free, plain = Log(), [clock.now()], wire.Started

    class Slow(plain):
        def __init__(self, result, complete=False):
            super().__init__(result, complete)
            self.done = 0.0
            if complete:  # nothing was sent
                return
            took = seconds(result.numel())
            self.done = free[0] = max(free[0], clock.now()) + took
            log.count, log.sent = log.count + 1, log.sent + took
            if blocking:
                self.arrive()

        def arrive(self):
            log.waited += max(0.0, self.done - clock.now())
            clock.until(self.done)

        def wait(self):
            self.arrive()
            return super().wait()

    wire.Started = Slow
    try:
        yield log
    finally:
        wire.Started = plain


def _measure(seconds_a_megabyte, chunks, sequence_parallel, steps=7):
    """Median seconds of a step: with no delay, blocking on the slow link, beside other work."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4}
    config = LlamaConfig(vocab_size=1024, num_attention_heads=8, use_cache=False, **sizes)
    ids = torch.randint(1024, (2, 256))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = tpcompile.shard(
        LlamaForCausalLM(config), mesh, {"input_ids": ids, "labels": ids},
        sequence_parallel=sequence_parallel, overlap_chunks=chunks, outputs="sharded",
    )  # fmt: skip
    clock, found = Real(), {"no delay": [], "one after the other": [], "side by side": []}
    for _ in range(steps):
        for name, times in found.items():
            slow = 0.0 if name == "no delay" else seconds_a_megabyte * 4e-6
            dist.barrier()
            begin = clock.now()
            with slow_link(
                clock, lambda n, slow=slow: n * slow, name == "one after the other"
            ) as log:
                model(input_ids=ids, labels=ids).loss.backward()
            times.append(clock.now() - begin)
    return {name: sorted(times)[steps // 2] for name, times in found.items()}, log


if __name__ == "__main__":
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import LlamaConfig, LlamaForCausalLM

    import tpcompile

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for scattered in (False, True):
        for chunks in (1, 4):
            found, log = _measure(0.01, chunks, scattered)
            if dist.get_rank() == 0:
                times = ", ".join(f"{name} {1e3 * s:.0f} ms" for name, s in found.items())
                kind = "sequence parallel" if scattered else "tensor parallel"
                print(
                    f"{kind}, {chunks} chunks: {times}; link busy {1e3 * log.sent:.0f} ms",
                    flush=True,
                )
    dist.destroy_process_group()
