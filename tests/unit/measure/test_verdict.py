from __future__ import annotations

import random

import pytest

from kvgen.errors import MeasureError
from kvgen.measure.measurement import compare


def noisy(mean: float, count: int = 30, spread: float = 0.02, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [mean * rng.uniform(1 - spread, 1 + spread) for _ in range(count)]


@pytest.mark.parametrize(("mean", "kind"), [(90.0, "faster"), (100.3, "same"), (110.0, "slower")])
def test_clear_cases(mean: float, kind: str) -> None:
    verdict = compare(noisy(mean, seed=1), noisy(100.0, seed=2))
    assert verdict.kind == kind
    assert verdict.low <= verdict.ratio <= verdict.high
    assert verdict.ratio == pytest.approx(mean / 100, abs=0.02)


def test_one_sample_decides_nothing() -> None:
    assert compare([97.0], [100.0]).kind == "unclear"
    assert compare([97.0] * 3, [100.0] * 3).kind == "faster"


def test_a_small_gain_within_noise_is_unclear() -> None:
    assert compare(noisy(97.0, 7, 0.1, seed=1), noisy(100.0, 7, 0.1, seed=2)).kind == "unclear"


def test_drift_that_both_share_drops_out() -> None:
    drift = [1 + 0.05 * i for i in range(20)]
    new, old = [95 * d for d in drift], [100 * d for d in drift]
    paired = compare(new, old)
    assert paired.kind == "faster"
    assert paired.high - paired.low < 0.05
    assert compare(new[:-1], old).high - compare(new[:-1], old).low > paired.high - paired.low


def test_the_effect_that_counts_can_be_chosen() -> None:
    new, old = noisy(96.0, 40, 0.005, 1), noisy(100.0, 40, 0.005, 2)
    assert compare(new, old, min_effect=0.02).kind == "faster"
    assert compare(new, old, min_effect=0.08).kind == "same"


def test_same_samples_give_the_same_verdict() -> None:
    new, old = noisy(97.0, seed=1), noisy(100.0, seed=2)
    assert compare(new, old) == compare(new, old)
    assert str(compare([1.0] * 3, [2.0] * 3)) == "faster (0.500, 0.500 to 0.500)"


@pytest.mark.parametrize(("new", "old"), [([], [1.0]), ([1.0], []), ([0.0], [1.0]), ([1.0], [-1.0])])
def test_senseless_samples_are_refused(new: list[float], old: list[float]) -> None:
    with pytest.raises(MeasureError):
        compare(new, old)
