"""Candidates that crash, hang, eat all memory, return wrong numbers or do not compile: recorded, named, survived."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvgen.measure.device import cold_bytes
from kvgen.measure.job import CheckPolicy
from kvgen.registry import Store
from kvgen.toolchain import ArtifactCache
from kvgen.tune.budget import Budget
from kvgen.tune.isolated_runner import IsolatedRunner
from kvgen.tune.result import TuningResult
from kvgen.tune.tuner import tune
from tests.support.faulty import FaultyBackend
from tests.support.naive import naive_spec

KINDS = {"crash": "crash", "hang": "timeout", "eat": "oom", "leak": "oom", "wrong": "wrong", "broken": "compile_error"}

LIMIT = 256 << 20
LARGE_CACHE = {"llc_bytes": 480 << 20}
"""Past a last-level cache of this size the buffers of a cold measurement are twice as large as the limit."""


def run(root: Path) -> TuningResult:
    cache = ArtifactCache(root / "cache")
    check = CheckPolicy(most_tokens=1 << 11)
    isolated_runner = IsolatedRunner(naive_spec(), "cpu", cache.root / "tuning", memory_bytes=LIMIT, timeout_s=30.0, check=check)
    return tune(
        naive_spec(),
        "cpu",
        Budget(),
        backends=[FaultyBackend()],
        store=Store(root / "registry"),
        cache=cache,
        runner=isolated_runner,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_fault_ends_the_run_and_each_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVGEN_MACHINE", json.dumps(LARGE_CACHE))
    assert cold_bytes("cpu") > LIMIT
    result = run(tmp_path)
    failures = {record.candidate.schedule.launch["fault"]: record for record in result.failures}
    assert {fault: record.kind for fault, record in failures.items()} == KINDS
    assert all(record.detail for record in failures.values())
    assert "SIGSEGV" in failures["crash"].detail
    assert "this schedule does not compile" in failures["broken"].detail
    assert result.entry.launches[0].params["fault"] == "none"
    named = result.to_json()["failures"]
    assert {(item["kind"], item["schedule"]["launch"]["fault"]) for item in named} == {(kind, fault) for fault, kind in KINDS.items()}
    again = run(tmp_path)
    assert again.measured == 0
    assert {record.kind for record in again.failures} == set(KINDS.values())
