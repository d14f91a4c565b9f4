"""What a plan of module styles says: the words, and what following them through a graph finds.

Hugging Face's `tp_plan` and torch's `parallelize_module` give each module a style and run all code
between the modules unchanged on whatever the modules hand out.
"""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from tpcompile.dims import Dim


@dataclass(frozen=True)
class Style:
    """One word of Hugging Face's vocabulary."""

    dim: int | None
    """Dim of the weight that is split; None: replicated."""
    takes: str = "whole"
    gives: str = "whole"
    """Whether the module takes and gives whole values or the rank's part: "whole", "part"."""
    outer: int = 1
    """Pieces of `dim` that are split one by one (2: gate and up)."""

    def gathers(self) -> bool:
        """Whether readers outside the module get whole values, whatever it computes inside."""
        return self.dim is not None and self.gives == "whole"


STYLES = {
    "colwise": Style(0, gives="part"),
    "colwise_gather_output": Style(0),
    "colwise_rep": Style(0),
    "packed_colwise": Style(0, gives="part", outer=2),
    "rowwise": Style(1, takes="part"),
    "rowwise_split_input": Style(1),
    "rowwise_rep": Style(1),
    "embedding_rowwise": Style(0),
    "embedding_colwise": Style(1),
    "replicated_with_grad_allreduce": Style(None),
    "replicate": Style(None),
}
"""The styles whose effect on a Linear, an Embedding or a norm is known here."""
GATHERED = {"colwise": "colwise_gather_output", "rowwise": "rowwise_split_input"}
"""Style -> the one that keeps the weight split, and takes and gives whole values."""
GRADIENT = "replicated_with_grad_allreduce"


class Held(NamedTuple):
    """A value of which each rank has a part."""

    atom: Dim | None
    """The named dim that is dealt out; None: equal chunks that are no whole units of any."""
    sources: frozenset[str]
    """Modules whose parts it was computed from."""


@dataclass(frozen=True)
class Conflict:
    """A place where the ranks' parts would give wrong numbers or no numbers."""

    path: str
    """Module whose code is at fault."""
    where: str
    """file.py:line, or ""."""
    reason: str
    modules: frozenset[str]
    """The modules whose styles lead to it."""
    kind: str = "part"
    """part: an op cannot take the parts; input: a row module gets a whole value; gradient."""


@dataclass(frozen=True)
class Sent:
    """One collective that a style causes."""

    module: str
    kind: str
    """all_reduce or all_gather."""
    direction: str
    """forward or backward."""
    nbytes: int


@dataclass
class Flow:
    """How values travel under a plan of styles."""

    held: dict[fx.Node, list[Held | None]] = field(default_factory=dict)
    """By node, for each output; None: whole on every rank."""
    conflicts: list[Conflict] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    applied: set[str] = field(default_factory=set)
    """Styled modules whose weight an op of the graph reads."""
    unequal: dict[str, str] = field(default_factory=dict)
    """Module whose equal chunks are no whole units -> what they are."""
    atoms: dict[str, Dim | None] = field(default_factory=dict)
    """The named dim that each part-giving or part-taking module is split by."""
    gradients: dict[str, int] = field(default_factory=dict)
    """Module with replicated parameters on a part -> the dim of its input that is dealt out."""
    compute: float = 0.0
    """Seconds of all ops, forward and backward."""
    communication: float = 0.0
    """Seconds of all collectives that the styles cause."""


def folded(name: str) -> str:
    """A name with layer numbers as `*`, exactly as transformers folds it.

    >>> folded("model.layers.11.mlp.up_proj")
    'model.layers.*.mlp.up_proj'
    """
    return re.sub(r"\.\d+(\.|$)", lambda found: ".*" + found.group(1), name)
