from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvgen.errors import MeasureError
from kvgen.lower.schedule import Params
from kvgen.measure import measurement
from kvgen.measure.measurement import Job, Measurement, TimingPolicy, compare, fingerprint
from kvgen.spec import Workload
from kvgen.verify import CheckPolicy
from tests.support.naive import naive_schedule, naive_spec

WORK = Workload(batch=2, kv_len=96)
GOOD = Measurement("ok", "", naive_schedule(), WORK, (3.0, 3.5, 4.0), 1.75, accuracy={"relative_l2": 1e-4}, seconds=2.5)


def test_jobs_and_measurements_cross_processes_as_json() -> None:
    timing = TimingPolicy(call="decode", read=True, threads=2)
    job = Job(naive_spec(), naive_schedule(), "cpu", Path("/a/module.so"), WORK, CheckPolicy(steps=5), timing)
    for one in (job, replace(job, workload=None, check=None, timing=None), GOOD, Measurement("crash", "it died")):
        assert type(one).from_json(json.loads(json.dumps(one.to_json()))) == one
    with pytest.raises(ValueError, match="kind: Input should be 'ok'"):
        Measurement.from_json({**GOOD.to_json(), "kind": "good"})
    assert (job.device, replace(job, target="sm90").device) == ("cpu", "cuda")


def test_ctrl_c_while_one_is_written_is_no_error_of_the_writer() -> None:
    class Interrupted(Params):
        def __iter__(self) -> Iterator[str]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace(GOOD, schedule=replace(naive_schedule(), launch=Interrupted())).to_json()


def test_figures_follow_from_the_samples() -> None:
    assert (GOOD.us, GOOD.cost, GOOD.read_fraction, GOOD.key) == (3.5, 3.5, 0.5, (naive_schedule().id, "2x96"))
    assert (Measurement("ok").us, Measurement("ok").read_fraction, Measurement("ok").cost) == (None, None, math.inf)
    assert replace(GOOD, kind="wrong").cost == math.inf


def test_a_sustained_workload_is_timed_under_load_unless_the_policy_says_for_how_long() -> None:
    rested, sustained = TimingPolicy(), TimingPolicy(sustained_seconds=2.0)
    assert rested.under("rested") == rested
    assert rested.under("sustained").sustained_seconds > 0
    assert sustained.under("sustained") == sustained.under("rested") == sustained


def test_a_cpu_is_told_by_its_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = fingerprint("cpu")
    assert facts == fingerprint("cpu") == json.loads(json.dumps(facts))
    assert facts["kind"] == "cpu"
    assert facts["name"]
    monkeypatch.setattr(measurement, "cpu_features", lambda: "flags: none")
    monkeypatch.setenv("KVGEN_MACHINE", json.dumps({"cores": 64, "llc_bytes": 1 << 20}))
    assert fingerprint("cpu")["features"] != facts["features"]
    assert (fingerprint("cpu")["llc_bytes"], fingerprint("cpu")["cores"]) == (1 << 20, 64)


def noisy(mean: float, count: int = 30, spread: float = 0.01, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [mean * draw.gauss(1, spread) for _ in range(count)]


@pytest.mark.parametrize(("mean", "kind"), [(90.0, "faster"), (110.0, "slower"), (100.0, "same")])
def test_clear_differences_are_called(mean: float, kind: str) -> None:
    verdict = compare(noisy(mean, seed=1), noisy(100.0, seed=2))
    assert verdict.kind == kind
    assert verdict.low <= verdict.ratio <= verdict.high
    assert verdict.ratio == pytest.approx(mean / 100, abs=0.02)
    assert verdict == compare(noisy(mean, seed=1), noisy(100.0, seed=2))


def test_few_samples_and_noise_decide_nothing() -> None:
    assert compare([97.0], [100.0]).kind == "unclear"
    assert str(compare([1.0] * 3, [2.0] * 3)) == "faster (0.500, 0.500 to 0.500)"
    assert compare(noisy(97.0, 7, 0.1, seed=1), noisy(100.0, 7, 0.1, seed=2)).kind == "unclear"


def test_drift_that_both_share_drops_out() -> None:
    drift = [1 + 0.05 * i for i in range(20)]
    new, old = [95 * d for d in drift], [100 * d for d in drift]
    paired = compare(new, old)
    assert paired.kind == "faster"
    assert paired.high - paired.low < 0.05
    assert compare(new[:-1], old).high - compare(new[:-1], old).low > paired.high - paired.low


@pytest.mark.parametrize(("new", "old"), [([], [1.0]), ([1.0], []), ([0.0], [1.0]), ([1.0], [-1.0])])
def test_senseless_samples_are_refused(new: list[float], old: list[float]) -> None:
    with pytest.raises(MeasureError):
        compare(new, old)
