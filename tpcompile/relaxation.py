"""Choose well where choosing exactly is too large: decide what ties the problem together first.

Layers that share their weights tie every layer to every other, and no elimination order is cheap.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from tpcompile.solver import Factor, Infeasible, Solution, TooLarge, allowed_values, solve


def solve_or_relax(domains: Sequence[int], factors: Sequence[Factor]) -> Solution:
    """The cheapest choice, or a cheap one (`exact` is False) where the cheapest takes too long.

    Raises:
        Infeasible: No choice was found that has a finite cost.
    """
    try:
        return solve(domains, factors)
    except TooLarge:
        pass
    common = [v for v, _ in _uses(factors).most_common()]
    count = 1
    while True:
        tying = common[:count]
        try:
            return _decide_first(domains, factors, tying)
        except TooLarge:
            if count >= len(common):
                raise
            count *= 2


def _uses(factors: Sequence[Factor]) -> Counter[int]:
    """In how many tables, with others, each variable is."""
    return Counter(v for scope, _ in factors if len(scope) > 1 for v in scope)


def _decide_first(
    domains: Sequence[int], factors: Sequence[Factor], tying: Sequence[int]
) -> Solution:
    """Fix the tying variables as a problem in which every table has its own copy would have them.

    Or all at their first value, if that is cheaper. Then each is freed in turn, the others fixed,
    and takes what is cheapest, as long as that helps.
    """
    first = {v: _fix(domains, v, 0) for v in tying}
    found: list[tuple[Solution, dict[int, Factor]]] = []
    for pins in (_votes(domains, factors, tying), first):
        with suppress(Infeasible):
            found.append((solve(domains, [*factors, *pins.values()]), pins))
    if not found:
        raise Infeasible(tying[0])
    best, fixed = min(found, key=lambda start: start[0].cost)
    return replace(_improved(domains, factors, best, fixed), exact=False)


def _improved(
    domains: Sequence[int], factors: Sequence[Factor], best: Solution, fixed: dict[int, Factor]
) -> Solution:
    """The best that freeing one variable at a time leads to."""
    before = float("inf")
    while best.cost < before:
        before = best.cost
        for v in list(fixed):
            others = [pin for u, pin in fixed.items() if u != v]
            with suppress(TooLarge):
                freed = solve(domains, [*factors, *others])
                if freed.cost < best.cost:
                    best = freed
                    fixed[v] = _fix(domains, v, freed.choice[v])
    return best


def _votes(
    domains: Sequence[int], factors: Sequence[Factor], tying: Sequence[int]
) -> dict[int, Factor]:
    """What most copies of each variable chose, where that can be met."""
    sizes, copied = list(domains), []
    copies: dict[int, list[int]] = {v: [] for v in tying}
    for scope, table in factors:
        own = []
        for v in scope:
            if v in copies and len(scope) > 1:
                copies[v].append(len(sizes))
                sizes.append(domains[v])
            own.append(copies[v][-1] if v in copies and len(scope) > 1 else v)
        copied.append((tuple(own), table))
    for (v, *more), table in factors:
        if v in copies and not more:  # what a value costs by itself, shared by the copies
            copied += [((c,), table / len(copies[v])) for c in copies[v]]
    choice = solve(sizes, copied).choice
    fixed: dict[int, Factor] = {}
    for v in tying:
        ((most, _),) = Counter(choice[c] for c in copies[v]).most_common(1)
        pin = _fix(domains, v, most)
        try:
            allowed_values(domains, [*factors, *fixed.values(), pin])
        except Infeasible:
            continue
        fixed[v] = pin
    return fixed


def _fix(domains: Sequence[int], variable: int, value: int) -> Factor:
    table = np.full(domains[variable], np.inf)
    table[value] = 0.0
    return (variable,), table
