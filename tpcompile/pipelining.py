"""What a linear and the collective next to it take, run one after the other or side by side."""

from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from tpcompile.cost import CostModel, bytes_of, hint

CHUNKS = (1, 2, 4, 8)
"""Numbers of chunks that `overlap_chunks="auto"` tries."""
_WORTH = 0.02
"""Part of the time that chunks must save: they cost kernels that a model of the cost misses."""


@dataclass(frozen=True)
class Lane:
    """One direction of a linear with its collective, in seconds for any number of chunks."""

    kind: str
    nbytes: float
    """Of the whole value that the collective is of."""
    rows: float
    """Of the matmul: tokens, which are what is cut into chunks."""
    columns: float
    depth: float
    dtype: torch.dtype
    cost: CostModel
    beside: float = 0.0
    """Of work that no chunk waits for: the weights' gradients."""

    def multiply(self, chunks: int = 1) -> float:
        """Seconds of the matmul of one chunk."""
        rows = self.rows / chunks
        moved = rows * self.columns + self.columns * self.depth + rows * self.depth
        flops = 2 * rows * self.columns * self.depth
        side = min(rows, self.columns, self.depth)
        return self.cost.compute(flops, moved * self.dtype.itemsize, self.dtype, False, side)

    def send(self, chunks: int = 1) -> float:
        """Seconds of the collective of one chunk."""
        return self.cost.collective(self.kind, self.nbytes / chunks)

    def apart(self) -> float:
        """Seconds where nothing runs side by side."""
        return self.multiply() + self.send() + self.beside

    def together(self, chunks: int) -> float:
        """Seconds where the collective of a chunk runs while other chunks are multiplied."""
        multiply, send = self.multiply(chunks), self.send(chunks)
        last = multiply + (chunks - 1) * max(multiply, send) + send
        return max(last, chunks * multiply + self.beside)

    def hidden(self, chunks: int) -> float:
        """Seconds of the collective that other work covers."""
        work = chunks * (self.multiply(chunks) + self.send(chunks)) + self.beside
        return work - self.together(chunks)


def lane_of(
    linears: list[fx.Node], kind: str, nbytes: float, cost: CostModel, *, row: bool, beside: bool
) -> Lane:
    """The lane of linears of one value; `row` says that what is split is the contracted dim.

    `beside` is where the weights' gradients, as large as the input's, run next to it.
    """
    x, weight = (arg.meta["val"] for arg in linears[0].args[:2])  # type: ignore[union-attr]
    columns = sum(hint(node.args[1].meta["val"].shape[0]) for node in linears)  # type: ignore[union-attr]
    rows, depth = float(prod(map(hint, x.shape[:-1]))), float(hint(weight.shape[1]))
    if row:
        depth /= cost.size
    else:
        columns /= cost.size
    lane = Lane(kind, nbytes, rows, float(columns), depth, x.dtype, cost)
    return Lane(**{**vars(lane), "beside": lane.multiply()}) if beside else lane


def best_chunks(lanes: list[Lane]) -> int:
    """How many chunks cost least over all lanes; one where more save next to nothing."""
    seconds = {n: sum(lane.together(n) for lane in lanes) for n in CHUNKS}
    best = min(CHUNKS, key=lambda n: (seconds[n], n))
    return best if seconds[best] < (1 - _WORTH) * seconds[1] else 1


def value_bytes(node: fx.Node) -> float:
    """Bytes of the whole value of a node."""
    return float(bytes_of(node.meta["val"]))
