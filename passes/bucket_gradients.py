"""Sum the gradients of replicated parameters in one all-reduce a block, not one each."""

import operator
from collections import defaultdict

from torch import fx

from tpcompile import collectives
from tpcompile.program import Program


def bucket_gradients(program: Program) -> Program:
    """Join the copies of parameters that one block (or the root) reads into one `copy_many`.

    Before:  %a = copy(%norm1.weight)   %b = copy(%norm2.weight)
    After:   %m = copy_many(axis, %norm1.weight, %norm2.weight)   %a = %m[0]   %b = %m[1]
    """
    buckets: dict[str, list[fx.Node]] = defaultdict(list)
    for node in program.calls(collectives.copy):
        if program.is_parameter(node.args[0]):
            buckets[node.meta.get("block", "")].append(node)
    for copies in buckets.values():
        if len(copies) > 1:
            _join(program, copies)
    return program


def _join(program: Program, copies: list[fx.Node]) -> None:
    axis = copies[0].args[1]
    with program.graph.inserting_before(copies[0]):
        joined = program.graph.call_function(
            collectives.copy_many, (axis, *(c.args[0] for c in copies))
        )
        joined.meta.update(copies[0].meta)
        joined.meta["val"] = tuple(c.meta["val"] for c in copies)
        joined.meta["dims"] = [c.meta["dims"][0] for c in copies]
        joined.meta["bucket"] = [c.meta["conversion"] for c in copies]
        del joined.meta["conversion"]
        for i, copy in enumerate(copies):
            item = program.graph.call_function(operator.getitem, (joined, i))
            item.meta.update(copy.meta)
            item.meta.pop("conversion")
            copy.replace_all_uses_with(item)
    for copy in copies:
        program.graph.erase_node(copy)
