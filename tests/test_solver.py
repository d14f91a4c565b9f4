"""The exact optimizer against brute force, an integer program, and its own promises."""

import doctest

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from tpcompile import solver
from tpcompile.solver import Factor, Infeasible, TooLarge, solve

Problem = tuple[list[int], list[Factor]]


class Network:
    """A random problem, built one variable at a time."""

    def __init__(self, seed: int, forbidden: float = 0.0, whole: bool = False) -> None:
        self.random = np.random.default_rng(seed)
        self.forbidden, self.whole = forbidden, whole
        self.domains: list[int] = []
        self.factors: list[Factor] = []

    def variable(self, size: int | None = None) -> int:
        """A new variable with 2 to 6 values and a cost for each."""
        self.domains.append(int(self.random.integers(2, 7)) if size is None else size)
        self.tie(len(self.domains) - 1)
        return len(self.domains) - 1

    def tie(self, *scope: int) -> None:
        """A factor; the all-zeros combination is never forbidden."""
        shape = tuple(self.domains[v] for v in scope)
        table = self.random.random(shape)
        if self.whole:
            table = np.floor(4 * table)
        table[self.random.random(shape) < self.forbidden] = np.inf
        table[(0,) * len(scope)] = 3.0
        self.factors.append((scope, table))

    def op(self, *operands: int) -> int:
        """A variable that pays for the conversion of each operand."""
        v = self.variable()
        for u in operands:
            self.tie(u, v)
        return v

    def chain(self, v: int, length: int) -> int:
        """`length` ops one after the other."""
        for _ in range(length):
            v = self.op(v)
        return v

    def linear(self, x: int) -> int:
        """An op that also reads a parameter."""
        return self.op(x, self.variable(3))

    def share(self, x: int, readers: list[int]) -> None:
        """A delivery variable between a value and its readers."""
        delivery = self.variable(4)
        for reader in readers:
            self.tie(x, delivery, reader)

    def norm(self, x: int) -> int:
        """An RMSNorm's eight ops; the cast input is read twice."""
        cast = self.chain(x, 1)
        scale = self.chain(self.variable(), 3)
        product = self.op(scale)
        self.share(cast, [scale, product])
        return self.op(self.chain(product, 1), self.variable(3))

    def rotate(self, x: int) -> int:
        """A rotary embedding: three readers of x, added up again."""
        cos, low, high = self.variable(), self.variable(), self.variable()
        self.share(x, [cos, low, high])
        return self.op(cos, self.chain(self.op(self.chain(low, 1), high), 1))


def transformer(layers: int, seed: int = 0) -> Problem:
    """The shape of a Llama, 74 variables and 151 factors a layer; four kinds of layer in turn."""
    net = Network(seed, forbidden=0.15)
    x = net.chain(net.variable(), 1)
    for layer in range(layers):
        net.random = np.random.default_rng((seed, layer % 4))
        normed = net.norm(cast := net.variable())
        q, k, v = net.linear(net.variable()), net.linear(net.variable()), net.linear(net.variable())
        net.share(normed, [q, k, v])
        q, k, v = net.chain(q, 2), net.chain(k, 2), net.chain(v, 2)
        attention = net.op(net.rotate(q), net.rotate(k), v)
        x1 = net.op(net.linear(net.chain(attention, 2)))
        net.share(x, [cast, x1])
        normed = net.norm(cast := net.variable())
        gate, up = net.linear(net.variable()), net.linear(net.variable())
        net.share(normed, [gate, up])
        x2 = net.op(net.linear(net.op(net.chain(gate, 1), up)))
        net.share(x1, [cast, x2])
        x = x2
    return net.domains, net.factors


def dense(problem: Problem) -> np.ndarray:
    """The cost of every choice, one dim a variable."""
    domains, factors = problem
    total = np.zeros(domains)
    for scope, table in factors:
        shape = [size if v in scope else 1 for v, size in enumerate(domains)]
        total = total + table.transpose(np.argsort(scope)).reshape(shape)
    return total


def cost_of(problem: Problem, choice: list[int]) -> float:
    """Sum of the factors at a choice, the plain way."""
    return sum(table[tuple(choice[v] for v in scope)] for scope, table in problem[1])


def small(seed: int) -> Problem:
    """Up to 8 variables, scopes in any order and repeated; ties, negatives, often infeasible."""
    random = np.random.default_rng(seed)
    domains = random.integers(1, 5, random.integers(1, 9)).tolist()
    forbidden = random.choice([0.0, 0.2, 0.6])
    factors: list[Factor] = []
    for _ in range(random.integers(0, 14)):
        arity = random.integers(1, min(3, len(domains)) + 1)
        scope = tuple(random.permutation(len(domains))[:arity].tolist())
        table = random.integers(-2, 4, [domains[v] for v in scope]).astype(float)
        if seed % 2:
            table += random.random(table.shape)
        table[random.random(table.shape) < forbidden] = np.inf
        factors.append((scope, table))
    return domains, factors


def integer_program_cost(problem: Problem) -> float:
    """The least cost as HiGHS finds it: one indicator for each finite entry of each factor."""
    domains, factors = problem
    offsets = np.cumsum([0, *domains])
    costs, upper = [np.zeros(offsets[-1])], [np.ones(offsets[-1])]
    rows, columns, signs, totals = [], [], [], []

    def require(positive: np.ndarray, negative: list[int], total: float) -> None:
        indices = [*positive.tolist(), *negative]
        rows.extend([len(totals)] * len(indices))
        columns.extend(indices)
        signs.extend([1.0] * len(positive) + [-1.0] * len(negative))
        totals.append(total)

    for v, size in enumerate(domains):
        require(offsets[v] + np.arange(size), [], 1.0)
    first = int(offsets[-1])
    for scope, table in factors:
        entries = first + np.arange(table.size).reshape(table.shape)
        first += table.size
        costs.append(np.where(table == np.inf, 0.0, table).ravel())
        upper.append((table != np.inf).astype(float).ravel())
        for axis, v in enumerate(scope):
            for value in range(domains[v]):
                require(entries.take(value, axis).ravel(), [int(offsets[v]) + value], 0.0)
    matrix = coo_array((signs, (rows, columns)), shape=(len(totals), first)).tocsr()
    result = milp(
        np.concatenate(costs),
        integrality=np.arange(first) < offsets[-1],
        bounds=Bounds(0, np.concatenate(upper)),
        constraints=LinearConstraint(matrix, totals, totals),
        options={"mip_rel_gap": 0},
    )
    assert result.success
    return result.fun


def skipping_chain(seed: int) -> Problem:
    """60 variables in a chain, with skips of 2 to 4 and some triples."""
    net = Network(seed, forbidden=0.3, whole=bool(seed % 2))
    for v in range(60):
        net.variable()
        if v:
            net.tie(v - 1, v)
        if v >= 4 and v % 3 == 0:
            net.tie(v, v - int(net.random.integers(2, 5)))
        if v >= 4 and v % 5 == 0:
            net.tie(v - 2, v, v - 1)
    return net.domains, net.factors


def test_small_problems_match_brute_force():
    """The least of all choices, or Infeasible exactly when every choice costs inf."""
    infeasible = 0
    for seed in range(600):
        problem = small(seed)
        least = dense(problem).min()
        if least == np.inf:
            infeasible += 1
            with pytest.raises(Infeasible):
                solve(*problem)
            continue
        solution = solve(*problem)
        assert solution.cost == pytest.approx(least, rel=1e-12, abs=1e-12), seed
        assert cost_of(problem, solution.choice) == pytest.approx(least, rel=1e-12, abs=1e-12)
    assert 100 < infeasible < 300


@pytest.mark.parametrize("problem", [*map(skipping_chain, range(6)), transformer(1)])
def test_larger_problems_match_an_integer_program(problem: Problem):
    """HiGHS, which shares nothing with elimination, finds the same least cost."""
    solution = solve(*problem)
    assert solution.cost == pytest.approx(cost_of(problem, solution.choice), rel=1e-12)
    assert solution.cost == pytest.approx(integer_program_cost(problem), rel=1e-6)


def test_work_is_linear_in_layers():
    """Twice the layers, twice the entries joined; the largest join does not grow with depth."""
    short, long = solve(*transformer(12)), solve(*transformer(24))
    assert long.work == pytest.approx(2 * short.work, rel=0.02)
    assert long.largest == short.largest


def test_same_problem_same_choice():
    """Ties do not depend on anything but the input, and the input is left alone."""
    problem = Network(3, whole=True)
    problem.chain(problem.variable(), 40)
    before = [table.copy() for _, table in problem.factors]
    first = solve(problem.domains, problem.factors)
    assert solve(problem.domains, problem.factors) == first
    for (_, table), old in zip(problem.factors, before, strict=True):
        np.testing.assert_array_equal(table, old)


def test_ties_go_to_the_lowest_value():
    """With nothing to choose by, every variable takes its first allowed value."""
    forbidden = np.array([np.inf, 0.0, 0.0])
    factors = [((0, 1), np.zeros((3, 3))), ((1, 2), np.zeros((3, 3))), ((1,), forbidden)]
    assert solve([3, 3, 3], factors).choice == [0, 1, 0]


def test_variable_in_no_factor_takes_its_first_value():
    """It costs nothing; nor does a problem without variables."""
    solution = solve([3, 2], [((1,), np.array([2.0, 1.0]))])
    assert (solution.choice, solution.cost) == ([0, 1], 1.0)
    assert solve([], []) == solver.Solution([], 0.0, 0, 0)


def test_variable_of_one_value_ties_nothing_together():
    """A pinned value read everywhere adds its costs and no work."""
    net = Network(1)
    net.chain(net.variable(), 30)
    alone = solve(net.domains, net.factors)
    pin = net.variable(1)
    for v in range(30):
        net.factors.append(((v, pin), np.ones((net.domains[v], 1))))
    pinned = solve(net.domains, net.factors)
    assert (pinned.largest, pinned.work) == (alone.largest, alone.work)
    assert pinned.choice == [*alone.choice, 0]
    assert pinned.cost == pytest.approx(alone.cost + 30 + 3)


def test_one_forbidden_value_fixes_a_chain():
    """Equality tables carry a pin to the far end: no value is left to choose, no table is made."""
    equal = np.where(np.eye(4, dtype=bool), 1.0, np.inf)
    factors = [((v + 1, v), equal) for v in reversed(range(50))]
    factors.append(((0,), np.array([np.inf, np.inf, 7.0, np.inf])))
    assert solve([4] * 51, factors) == solver.Solution([2] * 51, 57.0, 0, 0)


def test_infeasible_names_the_variable():
    """Found by pruning, by elimination (a triangle in two colours), and in an empty domain."""
    with pytest.raises(Infeasible, match=r"^no value of variable 1 has a finite cost$"):
        solve([2, 2], [((1,), np.array([np.inf, np.inf]))])
    differ = np.where(np.eye(2, dtype=bool), np.inf, 0.0)
    with pytest.raises(Infeasible) as caught:
        solve([2, 2, 2], [((0, 1), differ), ((1, 2), differ), ((2, 0), differ)])
    assert caught.value.variable in (0, 1, 2)
    with pytest.raises(Infeasible) as caught:
        solve([2, 0], [])
    assert caught.value.variable == 1


def test_join_over_the_limit_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch):
    """26 variables that all meet need 2**26 entries; a limit of exactly `largest` is enough."""
    pairs = [(u, v) for v in range(26) for u in range(v)]
    with pytest.raises(TooLarge) as caught:
        solve([2] * 26, [(pair, np.zeros((2, 2))) for pair in pairs])
    assert str(caught.value) == "eliminating variable 0 needs 67108864 entries, over 20000000"
    problem = transformer(1)
    largest = solve(*problem).largest
    monkeypatch.setattr(solver, "LIMIT", largest)
    assert solve(*problem).largest == largest
    monkeypatch.setattr(solver, "LIMIT", largest - 1)
    with pytest.raises(TooLarge):
        solve(*problem)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_costs_that_are_no_costs_are_our_own_bug(bad: float):
    """NaN and minus infinity trip an assertion instead of steering the choice."""
    with pytest.raises(AssertionError):
        solve([2, 2], [((0, 1), np.array([[0.0, bad], [np.inf, 1.0]]))])


def test_docstring_example():
    """The example in `solve` gives what it shows."""
    assert doctest.testmod(solver).failed == 0
