"""Copy a planned program, so that it can be localised for one rank after another."""

from dataclasses import fields, replace

from torch import fx

from tpcompile.program import Program


def clone(program: Program) -> Program:
    """A copy with a graph of its own; node meta values are shared."""
    graph, to = fx.Graph(), {}
    for node in program.graph.nodes:
        to[node] = graph.node_copy(node, to.__getitem__)
        assert to[node].name == node.name
        to[node].meta = dict(node.meta)
    extra = {**program.extra, "stages": list(program.extra.get("stages", ()))}
    plan = extra.get("assignment")
    if plan is not None:
        extra["assignment"] = replace(
            plan,
            strategies={to[n]: s for n, s in plan.strategies.items() if n in to},
            parameters={to[n]: s for n, s in plan.parameters.items() if n in to},
            delivered={(to[n], i): s for (n, i), s in plan.delivered.items() if n in to},
        )
    facts = extra.get("facts")
    if facts is not None:
        found = {f.name: getattr(facts, f.name) for f in fields(facts)}
        extra["facts"] = replace(
            facts, **{name: {to[n] for n in nodes if n in to} for name, nodes in found.items()}
        )
    return replace(program, graph=graph, extra=extra)
