"""Put a collective wherever a producer's placement differs from what a reader needs."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor, fx

from tpcompile import collectives
from tpcompile.cost import CostModel
from tpcompile.placement import R, State, Step, Value, normal, steps_between
from tpcompile.problem import Assignment
from tpcompile.program import Program, operands
from tpcompile.readers import Delivery, delivered_path, describe, reader_trained, readers_of
from tpcompile.strategies import Facts

FUNCTIONS: dict[str, Callable[..., object]] = {
    name: getattr(collectives, name)
    for name in (
        "copy",
        "all_reduce",
        "reduce_scatter",
        "all_gather",
        "split",
        "all_to_all",
        "to_partial",
        "pad",
    )
}


@dataclass(frozen=True)
class Conversion:
    """What a conversion node does; stands in its `meta["conversion"]`."""

    step: Step
    have: State
    need: State
    value: Value


def insert_collectives(program: Program) -> Program:
    """Convert every value to the state each of its readers needs.

    Before:  %y = linear(%h, %down)    %z = add(%x, %y)         (%y is P, add needs R)
    After:   %y = linear(%h, %down)    %r = all_reduce(%y)   %z = add(%x, %r)

    Every reader gets conversions of its own; `eliminate_redundant` merges equal ones.
    """
    plan: Assignment = program.extra["assignment"]
    facts: Facts = program.extra["facts"]
    cost: CostModel = program.extra["cost"]
    for key, readers in readers_of(program).items():
        have = state_of(key, plan)
        value = describe(key, facts, program)
        flags = [reader_trained(value, reader, facts) for reader, _ in readers]
        value = replace(value, trained=any(flags))
        for (reader, slot), flag in zip(readers, flags, strict=True):
            mine = replace(value, trained=flag)
            dims = key[0].meta["dims"][key[1]]
            delivery = Delivery(mine, dims, have, plan.delivered.get(key), cost)
            need = _need(reader, slot, plan, delivery)
            path = delivered_path(delivery, need)
            source = operands(reader)[slot]
            converted = _convert(program, source, reader, have, path, mine, value)
            if converted is not source:
                _replace_operand(reader, slot, converted)
    return program


def state_of(key: tuple[fx.Node, int], plan: Assignment) -> State:
    """The state a value is produced in."""
    node, index = key
    if node in plan.strategies:
        return plan.strategies[node].outs[index]
    return plan.parameters.get(node, R)


def _need(reader: fx.Node, slot: int, plan: Assignment, delivery: Delivery) -> State:
    """What the reader's strategy asks for; of what suits the output, what costs least."""
    strategy = plan.strategies.get(reader)
    if strategy is not None:
        return strategy.ins[slot]
    decider = plan.problem.decider(reader, slot)
    if decider is not reader:
        return plan.parameters[decider]
    return min(plan.problem.needs(reader, slot), key=delivery.total)


def _convert(
    program: Program,
    source: fx.Node,
    reader: fx.Node,
    have: State,
    path: tuple[State, ...],
    mine: Value,
    whole: Value,
) -> fx.Node:
    """Insert the conversions along `path`; the shared leg is priced for the value as a whole."""
    for position, need in enumerate(path):
        shared = len(path) > 1 and position == 0
        value = whole if shared else mine
        steps = steps_between(normal(have, value.trained), normal(need, value.trained))
        assert steps is not None, f"{source}: {have} -> {need}"
        for i, step in enumerate(steps):
            middle = need if i == len(steps) - 1 else R
            source = _insert(program, source, reader, Conversion(step, have, middle, value))
            have = middle
        have = need
    return source


def _insert(program: Program, source: fx.Node, reader: fx.Node, what: Conversion) -> fx.Node:
    # A parameter's conversion belongs to the block that reads it, so it stands by its reader.
    is_leaf = source.op == "placeholder" or source.meta.get("by_reader")
    where = (
        program.graph.inserting_before(reader) if is_leaf else program.graph.inserting_after(source)
    )
    with where:
        node = program.graph.call_function(FUNCTIONS[what.step.function], (source,))
    like = reader if is_leaf and reader.op != "output" else source
    node.meta.update(
        {k: like.meta[k] for k in ("path", "where", "modules", "calls") if k in like.meta}
    )
    node.meta["val"] = source.meta["val"]
    node.meta["dims"] = source.meta["dims"]
    node.meta["conversion"] = what
    node.meta["by_reader"] = is_leaf
    return node


def _replace_operand(reader: fx.Node, slot: int, new: fx.Node) -> None:
    """Replace the slot-th tensor operand only: another slot may hold the same node."""
    count = -1

    def swap(arg: object) -> object:
        nonlocal count
        if isinstance(arg, fx.Node) and isinstance(arg.meta.get("val"), Tensor):
            count += 1
            return new if count == slot else arg
        if isinstance(arg, (list, tuple)):
            return type(arg)(swap(a) for a in arg)
        return arg

    args = tuple(swap(a) for a in reader.args)
    kwargs = {k: swap(a) for k, a in reader.kwargs.items()}
    reader.args, reader.kwargs = args, kwargs  # type: ignore[assignment]
