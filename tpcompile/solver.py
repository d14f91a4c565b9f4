"""Choose one value per variable so that the sum of small cost tables is least, exactly.

Min-sum variable elimination (Dechter, "Bucket elimination", 1999).  Eliminating a variable joins
the tables that mention it and keeps, for each choice of its neighbours, the least cost.  The order
depends on scopes and sizes only, so it is found first, and a join too large is refused before any
table is made.  Nothing here knows what the variables mean.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
Factor = tuple[tuple[int, ...], Table]
"""(scope, table): a cost for each combination of the scope's variables; inf is forbidden."""

LIMIT = 20_000_000
"""Most entries of one joined table (8 bytes each)."""


class Infeasible(Exception):
    """No choice has a finite cost; `variable` is where that was found."""

    def __init__(self, variable: int) -> None:
        self.variable = variable
        super().__init__(f"no value of variable {variable} has a finite cost")


class TooLarge(Exception):
    """Eliminating `variable` would join a table of `size` entries."""

    def __init__(self, variable: int, size: int) -> None:
        self.variable, self.size = variable, size
        super().__init__(f"eliminating variable {variable} needs {size} entries, over {LIMIT}")


@dataclass(frozen=True)
class Solution:
    """The cheapest choice and what it took to find it."""

    choice: list[int]
    """Value of each variable."""
    cost: float
    """Sum of the given factors at the choice, correctly rounded."""
    largest: int
    """Entries of the largest joined table."""
    work: int
    """Entries of all joined tables."""
    exact: bool = field(default=True, repr=False)
    """Whether no choice costs less."""


def solve(domains: Sequence[int], factors: Sequence[Factor]) -> Solution:
    """The choice of `choice[v] in range(domains[v])` with the least sum of factor entries.

    Same input, same choice: a tie goes to the lowest value, in an order that depends only on the
    scopes, the sizes and which entries are inf.  Sums that are equal on paper may differ in the
    last bit of a float64; give costs as whole numbers (of picoseconds, say) where ties matter.

    Raises:
        Infeasible: every choice costs inf.
        TooLarge: a joined table would have more than `LIMIT` entries.

    >>> pair = np.array([[0.0, 0.0, 0.0], [4.0, 2.0, np.inf]])
    >>> solve([2, 3], [((0,), np.array([5.0, 1.0])), ((0, 1), pair)])
    Solution(choice=[1, 1], cost=3.0, largest=6, work=8)
    """
    for scope, table in factors:
        assert table.shape == tuple([domains[v] for v in scope]), (scope, table.shape)
        assert 0 < len(scope) == len(set(scope)), scope
    values = allowed_values(domains, factors)
    joins = _plan_joins([len(kept) for kept in values], [scope for scope, _ in factors])
    buckets = _fill_buckets(domains, factors, values, joins)
    minimum = _eliminate(joins, buckets)
    picks = _substitute(joins, buckets)
    choice = [int(kept[picks.get(v, 0)]) for v, kept in enumerate(values)]
    entries = [table.item(*[choice[v] for v in scope]) for scope, table in factors]
    cost = math.fsum(entries)
    assert abs(cost - minimum) <= 1e-9 * math.fsum(map(abs, entries)), (cost, minimum)
    sizes = [join.size for join in joins]
    return Solution(choice, cost, max(sizes, default=0), sum(sizes))


class _Join(NamedTuple):
    """The elimination of one variable."""

    scope: tuple[int, ...]
    """The variable, then its neighbours in the order in which they are eliminated later."""
    shape: tuple[int, ...]
    size: int


_Buckets = dict[int, list[Factor]]
"""Variable -> factors whose first eliminated variable it is; `_DONE` -> those without variables."""
_DONE = -1


def allowed_values(domains: Sequence[int], factors: Sequence[Factor]) -> list[NDArray[np.intp]]:
    """Values of each variable that have a finite entry in every factor (arc consistency)."""
    alive = [np.ones(size, bool) for size in domains]
    for v, size in enumerate(domains):
        if size == 0:
            raise Infeasible(v)
    finite = {i: factors[i][1] != np.inf for i in _with_inf(factors)}
    readers: dict[int, list[int]] = {}
    for i in finite:
        for v in factors[i][0]:
            readers.setdefault(v, []).append(i)
    queue = deque(finite)
    queued = set(finite)
    while queue:
        i = queue.popleft()
        queued.discard(i)
        for v in _drop_unsupported(factors[i][0], finite[i], alive):
            fresh = [j for j in readers[v] if j != i and j not in queued]
            queue.extend(fresh)
            queued.update(fresh)
    return [np.flatnonzero(mask) for mask in alive]


def _with_inf(factors: Sequence[Factor]) -> list[int]:
    """Indices of the factors that forbid something (one scan: a call per table is slow)."""
    if not factors:
        return []
    starts = np.cumsum([0, *[table.size for _, table in factors[:-1]]])
    entries = np.concatenate([table.ravel() for _, table in factors])
    return np.flatnonzero(np.logical_or.reduceat(entries == np.inf, starts)).tolist()


def _drop_unsupported(
    scope: tuple[int, ...], finite: NDArray[np.bool_], alive: list[NDArray[np.bool_]]
) -> list[int]:
    """Kill the values without a finite entry among living ones; the variables that lost some."""
    axes = range(len(scope))
    for axis, v in enumerate(scope):
        if not alive[v].all():
            finite = finite & alive[v].reshape([-1 if a == axis else 1 for a in axes])
    lost = []
    for axis, v in enumerate(scope):
        supported = np.logical_or.reduce(finite, axis=tuple([a for a in axes if a != axis]))
        kept = alive[v] & supported
        if not kept.any():
            raise Infeasible(v)
        if np.count_nonzero(kept) < np.count_nonzero(alive[v]):
            alive[v] = kept
            lost.append(v)
    return lost


def _plan_joins(sizes: Sequence[int], scopes: Sequence[tuple[int, ...]]) -> list[_Join]:
    """Eliminate every variable that has a choice, the smallest message first."""
    near: dict[int, set[int]] = {v: set() for v, size in enumerate(sizes) if size > 1}
    for scope in scopes:
        free = [v for v in scope if sizes[v] > 1]
        for v in free:
            near[v].update(free)
    for v, others in near.items():
        others.discard(v)
    order = _min_weight_order(sizes, near)
    position = {v: i for i, v in enumerate(order)}
    joins = []
    for v in order:
        scope = (v, *sorted(near[v], key=position.__getitem__))
        shape = tuple([sizes[u] for u in scope])
        joins.append(_Join(scope, shape, math.prod(shape)))
    return joins


def _min_weight_order(sizes: Sequence[int], near: dict[int, set[int]]) -> list[int]:
    """The order; leaves in `near[v]` the neighbours v has when its turn comes."""
    weight = {v: math.prod([sizes[u] for u in others]) for v, others in near.items()}
    heap = [(w, v) for v, w in weight.items()]
    heapify(heap)
    order: list[int] = []
    while heap:
        w, v = heappop(heap)
        if w != weight[v]:
            continue  # an entry from before a neighbour went, or v itself is gone
        if w * sizes[v] > LIMIT:
            raise TooLarge(v, w * sizes[v])
        order.append(v)
        weight[v] = 0
        for u in near[v]:
            fresh = near[v] - near[u]
            fresh.discard(u)
            near[u] |= fresh
            near[u].discard(v)
            new = weight[u] // sizes[v] * math.prod([sizes[x] for x in fresh])
            if new != weight[u]:
                weight[u] = new
                heappush(heap, (new, u))
    return order


def _fill_buckets(
    domains: Sequence[int],
    factors: Sequence[Factor],
    values: Sequence[NDArray[np.intp]],
    joins: Sequence[_Join],
) -> _Buckets:
    """Cut each table to the allowed values, drop axes of one value, order the rest, deal out."""
    position = {join.scope[0]: i for i, join in enumerate(joins)}
    buckets: _Buckets = {join.scope[0]: [] for join in joins}
    buckets[_DONE] = []
    whole = [len(kept) == size for kept, size in zip(values, domains, strict=True)]
    for scope, table in factors:
        for axis in reversed(range(len(scope))):
            v = scope[axis]
            if v not in position:
                table = table.take(values[v][0], axis)
            elif not whole[v]:
                table = table.take(values[v], axis)
        free = [v for v in scope if v in position]
        ranked = sorted(free, key=position.__getitem__)
        if ranked != free:
            table = table.transpose([free.index(v) for v in ranked])
        buckets[ranked[0] if ranked else _DONE].append((tuple(ranked), table))
    return buckets


def _eliminate(joins: Sequence[_Join], buckets: _Buckets) -> float:
    """The least cost; adds to each bucket the messages that belong in it."""
    for scope, shape, _ in joins:
        v = scope[0]
        # Small tables first: what they share is added before it is spread over the whole join.
        parts = buckets[v] = sorted(buckets[v], key=lambda part: part[1].size)
        total = np.zeros(shape[:1] + (1,) * (len(shape) - 1))
        for variables, table in parts:
            grid = [n if u in variables else 1 for u, n in zip(scope, shape, strict=True)]
            total = total + table.reshape(grid)
        message = np.minimum.reduce(total, axis=0)
        if np.minimum.reduce(message, axis=None) == np.inf:
            raise Infeasible(v)
        rest = scope[1:]
        buckets[rest[0] if rest else _DONE].append((rest, message))
    return math.fsum([table.item() for _, table in buckets[_DONE]])


def _substitute(joins: Sequence[_Join], buckets: _Buckets) -> dict[int, int]:
    """The position picked among each variable's allowed values, last eliminated first.

    A column of the join is added up again rather than a table of argmins kept: it is the same sum
    in the same order, and an argmin over a whole join costs as much as making it.
    """
    picks: dict[int, int] = {}
    for scope, shape, _ in reversed(joins):
        total = np.zeros(shape[0])
        for variables, table in buckets[scope[0]]:
            total = total + table[(slice(None), *[picks[u] for u in variables[1:]])]
        picks[scope[0]] = int(total.argmin())
    return picks
