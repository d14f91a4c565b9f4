"""How much of a sharded model's collectives runs while something else is computed."""

import re
from dataclasses import dataclass

from tabulate import tabulate


@dataclass(frozen=True)
class Covered:
    """One collective in one direction, and the work that runs beside it."""

    name: str
    """Of the node in dumps."""
    kind: str
    direction: str
    """forward or backward."""
    path: str
    """Module path."""
    nbytes: float
    """Of the whole value."""
    seconds: float
    """Predicted time of the collective."""
    hidden: float
    """Predicted seconds of it that independent work covers."""
    beside: str
    """That work."""

    @property
    def bytes_hidden(self) -> float:
        """The part of the bytes that moves meanwhile."""
        return self.nbytes * self.hidden / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Overlap:
    """All collectives of a sharded model; `print` shows them by kind of place."""

    collectives: tuple[Covered, ...]
    chunks: int | str
    """What `overlap_chunks` asked for."""

    @property
    def hidden(self) -> float:
        """Predicted seconds of collectives that other work covers."""
        return sum(each.hidden for each in self.collectives)

    @property
    def seconds(self) -> float:
        """Predicted seconds of all collectives."""
        return sum(each.seconds for each in self.collectives)

    def __str__(self) -> str:
        rows: dict[tuple[str, ...], list[Covered]] = {}
        for each in self.collectives:
            path = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", each.path)
            rows.setdefault((each.kind, each.direction, path, each.beside), []).append(each)
        table = [
            (
                kind,
                way,
                path,
                len(found),
                _us(found, "seconds"),
                _us(found, "hidden"),
                beside or "-",
            )
            for (kind, way, path, beside), found in rows.items()
        ]
        names = ["collective", "", "at", "count", "us", "hidden us", "while"]
        moved = sum(each.nbytes for each in self.collectives)
        hidden = sum(each.bytes_hidden for each in self.collectives)
        share = f"{hidden / moved:.0%}" if moved else "none"
        some = sum(each.hidden > 0 for each in self.collectives)
        times = f"predicted {self.hidden * 1e6:.1f} of {self.seconds * 1e6:.1f} us"
        return (
            f"{tabulate(table, names, floatfmt='.1f')}\n\n"
            f"{some} of {len(self.collectives)} collectives run beside other work, "
            f"{share} of the bytes: {times}"
        )


def _us(found: list[Covered], field: str) -> float:
    return sum(getattr(each, field) for each in found) * 1e6
