"""The model of the search, beside its formulas written out."""

from __future__ import annotations

import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest

from kvgen.tune.surrogate import NOISE, Surrogate

STEPS = (3, 0, 4)
"""Four numbers, three values without an order, five numbers."""
GRID = list(itertools.product(range(4), range(3), range(5)))
POINTS = np.array(GRID)


@pytest.fixture
def rows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Some that are known, two that are under way, all others."""
    every = np.random.default_rng(0).permutation(len(POINTS))
    return every[:20], every[20:22], every[22:]


def covariance(weights: np.ndarray, one: np.ndarray, other: np.ndarray) -> float:
    far = 0.0
    for weight, last, here, there in zip(weights, STEPS, one, other, strict=True):
        far += weight * ((here != there) if last == 0 else 0.5 * (here != there) + 0.5 * abs(here - there) / last)
    return math.exp(-far)


def test_improvements_are_those_of_the_posterior(rows: tuple[np.ndarray, ...]):
    known, pending, others = rows
    costs = np.exp(0.1 * POINTS[known, 0] + 0.05 * POINTS[known, 2])
    model = Surrogate(GRID, STEPS)
    found = model.improvements(others, known, costs, pending)
    standard = (np.log(costs) - np.log(costs).mean()) / np.log(costs).std()

    def between(some: np.ndarray, more: np.ndarray) -> np.ndarray:
        return np.array([[covariance(model._weights, POINTS[a], POINTS[b]) for b in more] for a in some])

    past = np.concatenate([known, pending])
    means = between(others, known) @ np.linalg.inv(between(known, known) + NOISE * np.eye(len(known))) @ standard
    inverse = np.linalg.inv(between(past, past) + NOISE * np.eye(len(past)))
    spreads = np.sqrt(1.0 - np.einsum("ab,bc,ac->a", between(others, past), inverse, between(others, past)))
    normal = NormalDist()
    for mean, spread, one in zip(means, spreads, found, strict=True):
        z = (standard.min() - mean) / spread
        assert one == pytest.approx(spread * (z * normal.cdf(z) + normal.pdf(z)), rel=1e-6, abs=1e-12)


def test_what_is_near_a_point_under_way_gains_less(rows: tuple[np.ndarray, ...]):
    known, pending, others = rows
    costs = 1.0 + POINTS[known].sum(1)
    alone, beside = (Surrogate(GRID, STEPS).improvements(others, known, costs, some) for some in (pending[:0], pending))
    assert (beside <= alone + 1e-9).all()
    near = [np.abs(POINTS[pending] - POINTS[one]).sum(1).min() == 1 for one in others]
    assert (beside[near] < 0.9 * alone[near]).any()


@pytest.mark.parametrize("matters", range(3))
def test_weights_follow_what_matters(rows: tuple[np.ndarray, ...], matters: int):
    known, pending, others = rows
    model = Surrogate(GRID, STEPS)
    for _ in range(4):
        model.improvements(others, known, np.exp(POINTS[known, matters] % 3), pending)
    weights = np.delete(model._weights, matters)
    assert model._weights[matters] > 4.0 * weights.max()


def test_failures_are_worse_than_what_runs(rows: tuple[np.ndarray, ...]):
    known, pending, others = rows
    costs = np.where(POINTS[known, 1] == 2, np.inf, 1.0 + POINTS[known, 0])
    found = Surrogate(GRID, STEPS).improvements(others, known, costs, pending)
    assert np.isfinite(found).all()
    assert POINTS[others[found.argmax()], 1] != 2


@pytest.mark.parametrize("count", [1, 7])
def test_equal_costs_leave_it_to_what_is_far_from_them(count: int):
    known, others = np.arange(count), np.arange(count, len(POINTS))
    found = Surrogate(GRID, STEPS).improvements(others, known, np.full(count, 3.3e-5), np.array([], int))
    assert found[-1] == pytest.approx(found.max())


def test_a_space_may_have_no_points_or_no_axes():
    Surrogate([], STEPS)
    none = np.array([], int)
    assert Surrogate([()], ()).improvements(np.array([0]), np.array([0]), np.array([5.0]), none).shape == (1,)
