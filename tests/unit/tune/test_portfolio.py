"""The choice of a portfolio from a matrix of times."""

from __future__ import annotations

import math
from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgen.tune.portfolio import ENOUGH, GAIN, MOST, TIED, choose, worst_by_size

INF = math.inf


def worst_of(regret: list[list[float]], chosen: tuple[int, ...]) -> float:
    return max(min(regret[launch][cell] for launch in chosen) for cell in range(len(regret[0])))


def regrets(times: list[list[float]]) -> list[list[float]]:
    """Times over the least time of each cell."""
    best = [min(column) for column in zip(*times, strict=True)]
    return [[time / least for time, least in zip(row, best, strict=True)] for row in times]


def test_one_launch_that_is_nearly_best_everywhere_is_enough():
    """Each of the others is best somewhere, by less than what a further launch has to save."""
    times = [[10.2, 10.2, 10.2], [10.0, 20.0, 20.0], [20.0, 10.0, 20.0], [20.0, 20.0, 10.0]]
    found = choose(regrets(times))
    assert found.launches == (0,)
    assert found.worst == pytest.approx(1.02)


def test_two_launches_where_none_is_good_everywhere():
    times = [[1.0, 1.0, 4.0, 4.0], [4.0, 4.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]]
    found = choose(regrets(times))
    assert found.launches == (0, 1)
    assert found.serves == (0, 0, 1, 1)
    assert found.worst == 1.0


def test_no_more_launches_than_allowed_and_then_the_least_worst_regret():
    """Seven cells, each with a launch of its own; one launch serves two of them 5 % slower."""
    times = [[1.0 if cell == launch else 3.0 for cell in range(7)] for launch in range(7)] + [[3.0] * 5 + [1.05, 1.05]]
    found = choose(regrets(times))
    assert found.launches == (0, 1, 2, 3, 4, 7)
    assert found.worst == pytest.approx(1.05)


def test_the_default_stays_and_serves_where_it_is_as_good():
    times = [[1.005, 2.0, 3.0], [1.0, 1.0, 3.0], [5.0, 5.0, 1.0]]
    found = choose(regrets(times), keep=[0])
    assert found.launches == (0, 1, 2)
    assert found.serves == (0, 1, 2)
    alone = choose(regrets([[9.0, 9.0], [1.0, 1.0]]), keep=[0])
    assert (alone.launches, alone.serves) == ((0, 1), (1, 1))


def test_a_limit_holds_even_if_it_takes_more_launches_than_allowed():
    """Three workloads that were tuned for, each with a winner of its own, and a portfolio of two."""
    times = [[1.0, 1.1, 1.1], [1.1, 1.0, 1.1], [1.1, 1.1, 1.0]]
    assert choose(regrets(times), most=2).worst == pytest.approx(1.1)
    assert choose(regrets(times), limits={0: TIED, 1: TIED, 2: TIED}, most=2).launches == (0, 1, 2)


def test_the_worst_regret_by_number_of_launches():
    """Seven cells, each with a launch of its own, which is 1 % to 7 % slower at the next cell; the first cell has a limit."""
    slower = [1.0 + launch / 100 for launch in range(1, 8)]
    times = [[1.0 if cell == launch else slower[launch] if cell == (launch + 1) % 7 else 3.0 for cell in range(7)] for launch in range(7)]
    assert worst_by_size(times, sizes=(3, 4, 5, 7)) == {3: 3.0, 4: pytest.approx(1.05), 5: pytest.approx(1.03), 7: 1.0}
    assert worst_by_size(times, keep=[6], limits={0: 1.0}, sizes=(1, 7)) == {7: 1.0}


def test_a_launch_that_cannot_serve_a_cell_is_not_counted_on():
    found = choose([[1.0, INF, 1.0], [1.5, 1.0, 1.5]])
    assert found.serves == (0, 1, 0)


def test_what_cannot_be_served_is_refused():
    with pytest.raises(ValueError, match="nothing to choose"):
        choose([])
    with pytest.raises(ValueError, match="no launch serves"):
        choose([[INF, 1.0], [INF, 1.0]])


MATRICES = st.integers(1, 7).flatmap(
    lambda launches: st.integers(1, 9).flatmap(
        lambda cells: st.lists(
            st.lists(st.sampled_from([1.0, 1.01, 1.02, 1.04, 1.2, 1.5, 2.0, 3.0]), min_size=cells, max_size=cells),
            min_size=launches,
            max_size=launches,
        )
    )
)


@given(MATRICES, st.integers(1, MOST))
def test_no_set_of_as_many_launches_has_a_clearly_smaller_worst_regret_and_no_smaller_set_is_as_good(times, most):
    """Against every set, by enumeration."""
    regret = regrets(times)
    found = choose(regret, most=most, enough=1.0)

    def least(size: int) -> float:
        return min(worst_of(regret, chosen) for chosen in combinations(range(len(regret)), min(size, len(regret))))

    def mean(chosen: tuple[int, ...]) -> float:
        return fmean(math.log(min(regret[launch][cell] for launch in chosen)) for cell in range(len(regret[0])))

    assert len(found.launches) <= most
    assert found.worst <= least(most) * (1 + GAIN) * TIED
    for launch in found.launches[1:]:
        without = tuple(one for one in found.launches if one != launch)
        assert worst_of(regret, without) > worst_of(regret, found.launches) or mean(without) > mean(found.launches)


def test_what_a_few_cells_cannot_have_does_not_decide_about_the_others():
    """Two cells each have a launch of their own, and ten cells two more launches. There is room for two, so the worst regret is 1.5 in any
    case. The ten cells gain more.
    """
    hard = [[1.5] * 12, [1.0, 1.5, *[1.5] * 10], [1.5, 1.0, *[1.5] * 10]]
    easy = [[1.5, 1.5, *(1.0 if cell % 2 == half else 1.3 for cell in range(10))] for half in (0, 1)]
    found = choose(hard + easy, keep=[0], most=3)
    assert (found.launches, found.worst) == ((0, 3, 4), 1.5)


def test_where_all_is_good_enough_no_launch_is_added_for_the_mean():
    times = [[1.0, 1.03, 1.03, 1.03], [1.03, 1.0, 1.0, 1.0]]
    assert choose(times, keep=[0]).launches == (0,)
    assert choose([[1.0, 1.05, 1.03, 1.03], *times[1:]], keep=[0]).launches == (0, 1)
    nearly = [[1.025] * 10, [1.0] * 5 + [1.4] * 5, [1.4] * 5 + [1.0] * 5]
    assert choose(nearly, keep=[0]).launches == (0,)


@given(MATRICES)
def test_the_portfolio_is_never_slower_than_the_default_and_each_member_serves(times):
    regret = regrets(times)
    found = choose(regret, keep=[0])
    for cell, launch in enumerate(found.serves):
        assert launch in found.launches
        assert regret[launch][cell] <= regret[0][cell] * 1.0000001
        assert regret[launch][cell] <= TIED * min(regret[one][cell] for one in found.launches)
    assert set(found.launches) <= {0, *found.serves}
    assert found.worst == max(regret[launch][cell] for cell, launch in enumerate(found.serves))


@given(MATRICES)
def test_good_enough_is_good_enough(times):
    regret = regrets(times)
    found = choose(regret)
    smaller = [chosen for size in range(1, len(found.launches)) for chosen in combinations(range(len(regret)), size)]
    if found.worst <= ENOUGH:
        assert all(worst_of(regret, chosen) > ENOUGH for chosen in smaller) or len(found.launches) == 1
