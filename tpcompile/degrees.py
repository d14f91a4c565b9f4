"""What one degree of tensor parallelism costs a model: memory, time, the longest sequence."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from tpcompile import pipeline
from tpcompile.clone import clone
from tpcompile.cost import hint
from tpcompile.hardware import Hardware
from tpcompile.memory import Optimizer, memory_of, saved_on_rank
from tpcompile.placement import R
from tpcompile.predict import Times, predict
from tpcompile.problem import Assignment
from tpcompile.program import Program, operands, values
from tpcompile.readers import ValueKey, value_of
from tpcompile.saved import Saved

USABLE = 0.9
"""Of a device's memory, what tensors can use: the rest is the CUDA context, communication
buffers, temporary results and what the allocator wastes."""


@dataclass(frozen=True)
class Degree:
    """One row of the advice: bytes and seconds of one rank, one forward and backward pass."""

    size: int
    sequence_parallel: bool
    """What the plan does when "auto" decides."""
    state: float
    """Bytes of weights, gradients, optimizer state and buffers."""
    gradients: float
    """Of `state`, bytes of gradients."""
    block_state: float
    """Of `state`, bytes of the repeated blocks together."""
    activations: float
    block_activations: float
    block_inputs: float
    """Bytes that checkpointing every block keeps of all of them."""
    times: Times
    optimizer_seconds: float
    """Of one optimizer step: its reads and writes of the state."""
    crosses_node: bool
    longest: int | None
    """Longest sequence that fits with sequence parallelism; None where it is not symbolic."""
    longest_without: int | None
    """The same without sequence parallelism."""

    @property
    def memory(self) -> float:
        """Bytes a rank needs."""
        return self.state + self.activations

    @property
    def step(self) -> float:
        """Seconds of forward, backward and optimizer."""
        return self.times.step + self.optimizer_seconds

    @property
    def exposed(self) -> float:
        """Share of the step that ranks spend in collectives."""
        return self.times.communication / self.step

    def fits(self, memory: float) -> bool:
        """Whether a rank has room in a device of `memory` bytes."""
        return self.memory <= USABLE * memory


def degree_for(
    program: Program, size: int, hardware: Hardware, memory: float, optimizer: Optimizer
) -> Degree:
    """Plan a captured program for `size` ranks, and measure the plan on paper."""
    planned = _planned(program, size, hardware, "auto")
    parallel = any(c.forward == "reduce_scatter" for c in planned.extra["collectives"])
    held = memory_of(planned, optimizer)
    activations = held.rank["activations"]
    state = held.total - activations
    longest = longest_without = None
    symbol = sequence_symbol(program)
    if symbol is not None:
        room = USABLE * memory - state
        longest = longest_without = _longest(planned, symbol, room)
        if size > 1:
            other = _planned(program, size, hardware, not parallel)
            length = _longest(other, symbol, room)
            longest, longest_without = (longest, length) if parallel else (length, longest)
    return Degree(
        size,
        parallel,
        state,
        held.rank["gradients"],
        _block_state(planned, optimizer),
        activations,
        sum(nbytes for block, nbytes in held.by_block.items() if block),
        _block_inputs(planned),
        predict(planned),
        # It reads and writes weights and state, and reads gradients.
        (2 * state - held.rank["gradients"]) / hardware.memory_bandwidth,
        hardware.crosses(size),
        longest,
        longest_without,
    )


def _planned(
    program: Program, size: int, hardware: Hardware, sequence_parallel: bool | str
) -> Program:
    copy = clone(program)
    copy.extra["stages"] = []
    return pipeline.plan(copy, size, hardware=hardware, sequence_parallel=sequence_parallel)


def sequence_symbol(program: Program) -> Any:
    """The symbol of the sequence length: a symbolic dim 1 of an input; None where there is none."""
    return next((s for s, (_, dim) in program.symbols.items() if dim == 1), None)


def _longest(program: Program, symbol: Any, room: float) -> int:
    """The longest sequence whose activations take at most `room` bytes, 0 where none does."""
    plan: Assignment = program.extra["assignment"]
    sizes = plan.choices.sizes
    now = sizes.hints[symbol]
    by_power: dict[int, float] = {}
    for saved in saved_on_rank(program):
        exprs = [sizes.expr(d.root().size) for d in saved.dims if d is not None]
        power = sum(symbol in getattr(expr, "free_symbols", ()) for expr in exprs)
        nbytes = saved.local_bytes(plan.choices.cost.size)
        by_power[power] = by_power.get(power, 0.0) + nbytes
    return _last(lambda s: sum(b * (s / now) ** p for p, b in by_power.items()) <= room)


def _last(holds: Callable[[int], bool], limit: int = 1 << 30) -> int:
    """The largest int up to `limit` for which a condition that ends once still holds."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def block_of(program: Program, parameter: str) -> str:
    """Path of the repeated block a parameter is in, or ""."""
    paths: set[str] = program.extra.get("block_paths", set())
    return next((path for path in paths if parameter.startswith(path + ".")), "")


def _block_state(program: Program, optimizer: Optimizer) -> float:
    """Bytes of weights, gradients and optimizer state of all blocks on a rank."""
    plan: Assignment = program.extra["assignment"]
    total = 0.0
    for node, state in plan.parameters.items():
        leaf = program.leaves[node.name]
        if leaf.kind != "parameter" or not block_of(program, leaf.name):
            continue
        val = node.meta["val"]
        nbytes = _local_bytes((node, 0), state, plan)
        per_weight = val.dtype.itemsize
        if node in plan.choices.facts.trained:
            kept = (optimizer.gradient, *optimizer.states)
            per_weight += sum((dtype or val.dtype).itemsize for dtype in kept)
        total += nbytes / val.dtype.itemsize * per_weight
    return total


def _block_inputs(program: Program) -> float:
    """Bytes of the trained values that enter blocks, on a rank."""
    plan: Assignment = program.extra["assignment"]
    trained = plan.choices.facts.trained
    entering: dict[tuple[str, ValueKey], None] = {}
    for node in program.calls():
        block = node.meta.get("block", "")
        for source in operands(node) if block else []:
            what = source.meta.get("conversion")
            flows = what.value.trained if what else source in trained
            if flows and source.op != "placeholder" and source.meta.get("block", "") != block:
                entering[block, value_of(source)] = None
    return sum(_local_bytes(key, _state(key, plan), plan) for _, key in entering)


def _state(key: ValueKey, plan: Assignment) -> Any:
    node, index = key
    if "conversion" in node.meta:
        return node.meta["conversion"].need
    strategy = plan.strategies.get(node)
    return strategy.outs[index] if strategy is not None else R


def _local_bytes(key: ValueKey, state: Any, plan: Assignment) -> int:
    node: fx.Node
    node, index = key
    val = values(node)[index]
    shape = tuple(map(hint, val.shape))
    saved = Saved(node, node.meta["dims"][index], shape, val.dtype.itemsize, state)
    return saved.local_bytes(plan.choices.cost.size)
