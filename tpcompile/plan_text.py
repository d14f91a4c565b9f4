"""How a plan's file is written: its JSON, and the placements in it."""

import json
import re
from collections.abc import Mapping
from typing import Any

from torch.distributed.tensor import Placement, Replicate, Shard

from tpcompile.errors import ShardingError


def json_text(data: Mapping[str, Any]) -> str:
    """JSON with one line an entry of the second level, so that a change is one line of a diff."""
    parts = []
    for key, value in data.items():
        items = list(value.items()) if isinstance(value, dict) else None
        rows = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in items or ()]
        if isinstance(value, list):
            rows = [json.dumps(each) for each in value]
        ends = "{}" if items is not None else "[]"
        inner = f"{ends[0]}\n    " + ",\n    ".join(rows) + f"\n  {ends[1]}"
        parts.append(f"  {json.dumps(key)}: {inner if rows else json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def placement_text(placement: Placement) -> str:
    """`Shard(0)` or `Replicate`, as a plan's file has it."""
    return f"Shard({placement.dim})" if isinstance(placement, Shard) else "Replicate"


def placement_from(text: str) -> Placement:
    """The placement of a text: `Shard(dim)` or `Replicate`.

    >>> placement_from("Shard(0)"), placement_from("Replicate")
    (Shard(dim=0), Replicate())
    """
    found = re.fullmatch(r"Shard\((?:dim=)?(-?\d+)\)", text.replace(" ", ""))
    if found:
        return Shard(int(found[1]))
    if text in ("Replicate", "Replicate()"):
        return Replicate()
    raise ShardingError(
        f"cannot read the placement {text!r}.",
        'it is neither "Shard(dim)" nor "Replicate".',
        'write "Shard(0)" to split dim 0, "Shard(1)" to split dim 1, or "Replicate"',
    )
