from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from kvgen.lower.schedule import Params
from kvgen.measure.measurement import Job, Measurement, TimingPolicy
from kvgen.spec import Workload
from kvgen.spec.timing import Timing
from kvgen.verify import CheckPolicy
from tests.support.naive import naive_layout, naive_schedule, naive_spec


def job() -> Job:
    spec = naive_spec()
    timing = TimingPolicy(call="decode", read=True, threads=2)
    return Job(spec, naive_schedule(), "cpu", Path("/a/module.so"), spec.workloads, CheckPolicy(seed=3), timing)


def test_jobs_cross_processes_as_json_and_pickles() -> None:
    for one in (job(), replace(job(), check=None, timing=None)):
        assert Job.from_json(json.loads(json.dumps(one.to_json()))) == one
        assert pickle.loads(pickle.dumps(one)) == one


def test_outcomes_cross_processes_as_json_and_pickles() -> None:
    timing = Timing(Workload(batch=2, kv_len=96), 3.5, (3.0, 3.5, 4.0), 1.25)
    outcome = Measurement("ok", "", (timing,), {"relative_l2": 1e-4}, 2.5)
    assert Measurement.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome
    assert pickle.loads(pickle.dumps(outcome)) == outcome
    assert outcome.ok
    assert not Measurement("wrong").ok


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind: Input should be 'ok'"):
        Measurement.from_json({**Measurement("ok").to_json(), "kind": "good"})


def test_layout_and_device_follow_schedule_and_target() -> None:
    assert job().layout() == naive_layout(naive_spec())
    assert job().device == "cpu"
    assert replace(job(), target="sm90").device == "cuda"
    odd = replace(naive_schedule(), layout=Params(block=32, order="spiral"))
    with pytest.raises(ValueError, match="unknown order 'spiral'"):
        replace(job(), schedule=odd).layout()
