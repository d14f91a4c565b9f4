"""Which graphs a sharded model has been captured to so far, and for which calls."""

from dataclasses import dataclass

from sympy import sympify

from tpcompile.host_sync import host_syncs
from tpcompile.labels import symbol_names
from tpcompile.program import Program


@dataclass(frozen=True)
class Capture:
    """One graph of a sharded model, for all calls that fit its inputs."""

    module: str
    """Path of the module that is called: "" for the model."""
    inputs: tuple[str, ...]
    """Each as `input_ids[b, s]`, sizes that vary as letters; the tensors of caches are left out."""
    cached: int
    """How many tensors of caches it takes."""
    training: bool
    divides: tuple[str, ...]
    """Sizes that the degree has to divide, because sequence parallelism deals them out."""
    host_syncs: tuple[str, ...]
    """What keeps the graph from being run as a CUDA graph: see `host_sync`."""

    def __str__(self) -> str:
        parts = [f"{self.module or 'model'}({', '.join(self.inputs)})"]
        parts.append("train" if self.training else "eval")
        if self.cached:
            parts.append(f"a cache of {self.cached} tensors")
        if self.divides:
            parts.append(f"degree divides {', '.join(self.divides)}")
        parts += [f"waits for the device: {each}" for each in self.host_syncs]
        return "; ".join(parts)


def capture_of(program: Program, module: str, training: bool) -> Capture:
    """What is to be said of a localised program."""
    names, cached = symbol_names(program), program.extra["cache_inputs"]
    inputs = []
    for node in program.placeholders("input"):
        if node.name not in cached:
            sizes = program.extra["input_shapes"][node.name]
            shape = ", ".join(str(sympify(size).subs(names)) for size in sizes)
            inputs.append(f"{program.leaves[node.name].name}[{shape}]")
    divides = tuple(sorted(str(size.subs(names)) for size in program.extra["dynamic"]))
    return Capture(module, tuple(inputs), len(cached), training, divides, host_syncs(program))
