"""What the torch.compile backend has to say of the graphs that it was given."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tpcompile.capture_watch import is_user_file
from tpcompile.explain import Explanation
from tpcompile.program import Program


@dataclass(frozen=True)
class PieceText:
    """One graph of Dynamo's."""

    number: int
    broke: bool
    """Whether Dynamo could not go on behind it."""
    reason: str
    """Why it ends."""
    frames: Any
    """Of the user, where it ends."""
    planned: Program | None
    """None where it reads no parameter, and runs as it is."""
    whole: str
    """Why it runs whole in spite of its parameters, or ""."""
    variants: int
    """How often it was planned and compiled: once more for other trained parameters."""

    @cached_property
    def explanation(self) -> Explanation | None:
        """Its plan and the reasons for it."""
        return None if self.planned is None else Explanation(self.planned)

    @property
    def where(self) -> str:
        """The line of the model where it ends, or ""."""
        frames = [f for f in self.frames or () if is_user_file(f.filename)]
        return f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""

    def lines(self) -> Iterator[str]:
        """Its text."""
        end = f"breaks at {self.where}" if self.broke else f"returns at {self.where}"
        yield f"graph {self.number} {end}"
        if self.broke:
            yield from (f"  {line}" for line in self.reason.strip().splitlines() if line.strip())
        if self.whole:
            yield f"  runs whole: {self.whole}"
        elif self.explanation is None:
            yield "  reads no parameter: runs whole on every rank"
        else:
            yield ""
            yield str(self.explanation.plan)


@dataclass(frozen=True)
class BackendExplanation:
    """The graphs of a compiled model in the order that they were compiled."""

    pieces: list[PieceText]

    def __str__(self) -> str:
        broken = sum(piece.broke for piece in self.pieces)
        compiled = sum(max(piece.variants, 1) for piece in self.pieces)
        head = f"{len(self.pieces)} graphs, {broken} of them end in a break; {compiled} compiled"
        return "\n\n".join([head, *("\n".join(piece.lines()) for piece in self.pieces)])
