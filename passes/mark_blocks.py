"""Say which repeated block of the model every node belongs to."""

import torch
from torch import fx

from tpcompile.placement import P
from tpcompile.program import Program


def mark_blocks(program: Program) -> Program:
    """Set `node.meta["block"]` to the path of the block module that ran the node, or "".

    Before:  %y = linear(%h, %w)   # layers.0.mlp.down
    After:   %y = linear(%h, %w)   # layers.0.mlp.down   block layers.0

    `program.extra["block_paths"]` are the candidates.  A block that is called twice, or whose
    nodes cannot be run in one go, is dissolved into its surroundings.  The sizes of inputs are of
    no block: the first to ask for them would differ from the others.
    """
    paths: set[str] = program.extra.get("block_paths", set())
    repeated: set[str] = set()
    for node in program.calls():
        node.meta["block"] = ""
        if _is_outer_size(node):
            continue
        modules, calls = node.meta.get("modules", ()), node.meta.get("calls", ())
        for path, call in zip(modules, calls, strict=True):
            if path in paths:
                node.meta["block"] = path
                if call:
                    repeated.add(path)
                break
    _claim_conversions(program)
    dissolved = repeated | _interrupted(program)
    while dissolved:
        for node in program.calls():
            if node.meta["block"] in dissolved:
                node.meta["block"] = ""
        dissolved = _interrupted(program)
    return program


def _is_outer_size(node: fx.Node) -> bool:
    """Whether a node is a number that depends on nothing inside a block."""
    number = isinstance(node.meta["val"], int | torch.SymInt)
    return number and not any(source.meta.get("block") for source in node.all_input_nodes)


def _claim_conversions(program: Program) -> None:
    """A conversion whose readers are all in one block belongs there, not to its source.

    Not that of a partial sum: what enters a block is a value that hooks can make sense of, and
    the first block is like the others.
    """
    for node in reversed(program.graph.nodes):
        what = node.meta.get("conversion")
        if what is not None and what.have != P:
            homes = {user.meta.get("block", "") for user in node.users}
            if len(homes) == 1 and "" not in homes:
                node.meta["block"] = homes.pop()


def _interrupted(program: Program) -> set[str]:
    """Blocks of which a node needs something computed outside from another node of it."""
    bit: dict[str, int] = {}
    reach: dict[fx.Node, int] = {}
    found: set[str] = set()
    for node in program.calls():
        block = node.meta["block"]
        own = bit.setdefault(block, 1 << len(bit)) if block else 0
        seen = own
        for source in node.all_input_nodes:
            behind = reach.get(source, 0)
            seen |= behind
            if own & behind and source.meta.get("block") != block:
                found.add(block)
        reach[node] = seen
    return found
