"""A model of what untried schedules cost, by those that were measured: Bayesian optimization over a finite set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating[Any]]
Rows = npt.NDArray[np.int64]

NOISE = 1e-3
"""Variance of a measurement, where that of the measured costs is 1."""
LEAST_SPREAD = 0.01
"""Standard deviation of the logarithms of costs below which they count as equal."""
PRIOR_SPREAD = 3.0
"""Standard deviation of the logarithm of a weight, before anything was measured."""


class Surrogate:
    """A Gaussian process over points of a grid. The one with the greatest expected improvement is tried next.

    The covariance of two points a and b is exp(-sum of w_n d_n) over the axes n. Of numbers, d_n = ½ [a_n ≠ b_n] + ½ |a_n - b_n| / steps,
    in places of the axis; of other values [a_n ≠ b_n]. The weights w_n start from 1, and every call doubles or halves those of which that
    raises the marginal likelihood times a log-normal prior. Rasmussen and Williams, Gaussian Processes for Machine Learning (2006); Jones,
    Schonlau and Welch, Efficient Global Optimization of Expensive Black-Box Functions (1998).
    """

    def __init__(self, points: Sequence[Sequence[int]], steps: Sequence[int]) -> None:
        """`points`: [points, axes], the places of their values. `steps`: of an axis of numbers their last place, 0 of other values."""
        every = np.array(points, int).reshape(len(points), len(steps))
        features, axes = [np.empty((len(points), 0))], list[int]()  # of two points' features the squared distance is the sum of d_n
        for axis, (places, last) in enumerate(zip(every.T, steps, strict=True)):
            values = np.arange(places.max(initial=0) + 1)
            features.append((places[:, None] == values) * math.sqrt(0.25 if last else 0.5))
            features.append((places[:, None] > values) * math.sqrt(0.5 / last if last else 0.0))
            axes += [axis] * (2 * len(values))
        self._features, self._axes = np.hstack(features), axes
        self._weights: Array = np.ones(len(steps))

    def improvements(self, rows: Rows, known: Rows, costs: Array, pending: Rows) -> Array:
        """By how much each of `rows` is expected to be better than the best known, in standard deviations of the logarithms of `costs`.

        `costs` are of the points `known`, at least one of them finite; failures are infinite, and count as twice the worst. `pending` are
        under way: what is near them is less uncertain.
        """
        costs = np.log(np.minimum(costs, 2.0 * costs[np.isfinite(costs)].max()))
        costs = (costs - costs.mean()) / max(costs.std(), LEAST_SPREAD)
        self._fit(known, costs)
        past, count = np.concatenate([known, pending]), len(known)
        whiten = np.linalg.inv(self._factor(past))  # it begins with that of what is known
        explained = whiten @ self._covariance(past, rows)
        mean = whiten[:count, :count] @ costs @ explained[:count]
        deviation = np.sqrt(np.maximum(1.0 - (explained**2).sum(0), 1e-12))
        z = (costs.min() - mean) / deviation
        below = 0.5 * np.array([math.erfc(-one / math.sqrt(2.0)) for one in z])
        improvements: Array = deviation * (z * below + np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi))
        return improvements

    def _covariance(self, here: Rows, there: Rows) -> Array:
        scale = np.sqrt(self._weights)[self._axes]
        one, other = self._features[here] * scale, self._features[there] * scale
        covariance: Array = np.exp(2.0 * one @ other.T - (one**2).sum(1)[:, None] - (other**2).sum(1))
        return covariance

    def _factor(self, rows: Rows) -> Array:
        """Cholesky's, of measurements with noise."""
        return np.linalg.cholesky(self._covariance(rows, rows) + NOISE * np.eye(len(rows)))

    def _fit(self, known: Rows, costs: Array) -> None:
        """Halve or double each weight where that makes weights and costs more likely."""

        def unlikely(weights: Array) -> float:
            self._weights = weights
            factor = self._factor(known)
            fit, prior = np.linalg.solve(factor, costs), np.log(weights) / PRIOR_SPREAD
            return float(0.5 * (fit @ fit + prior @ prior) + np.log(np.diag(factor)).sum())

        best, least = self._weights, unlikely(self._weights)
        for axis in range(len(best)):
            for scale in (0.5, 2.0):
                weights = best.copy()
                weights[axis] *= scale
                if (now := unlikely(weights)) < least:
                    best, least = weights, now
        self._weights = best
