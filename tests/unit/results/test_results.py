from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from kvgen import results
from kvgen.bench.run import frame, write_csv
from kvgen.errors import KvgenError
from kvgen.registry import Store
from kvgen.results.numbers import count, factor, fraction, microseconds
from kvgen.results.page import render
from kvgen.toolchain import ArtifactCache
from kvgen.tune.budget import Budget
from kvgen.tune.tuner import TuningResult, tune
from tests.support.tuning import FakeBackend, FakeRunner, compile_nothing, tiny_spec

FACTS = {"call": "attend", "load": "burst", "device": "GPU", "threads": "", "driver": "1", "torch": "2", "kvgen": "0", "date": "2026-01-01"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> ArtifactCache:
    return ArtifactCache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("registry"))


@pytest.fixture(scope="module")
def built(store: Store, cache: ArtifactCache) -> TuningResult:
    """Two builds of one spec, under policies that differ; eight threads crash in the second one."""
    with pytest.MonkeyPatch.context() as patch:
        compile_nothing(patch)
        here: dict[str, Any] = {"backends": [FakeBackend()], "store": store, "cache": cache}
        tune(tiny_spec(), "cpu", Budget(trials=2), runner=FakeRunner(policy={"runner": "old"}), **here)
        runner = FakeRunner(outcome=lambda candidate: "crash" if candidate.schedule.launch["threads"] == 8 else "ok")
        return tune(tiny_spec(), "cpu", Budget(), runner=runner, **here)


def row(provider: str, backend: str, us: float) -> dict[str, object]:
    figures = {"bytes": 1000, "tb_s": 1.0, "read_us": 5.0, "read_fraction": 0.5, "relative_l2": 0.0, "watts": None, "clock_mhz": None}
    return {
        "provider": provider, "backend": backend, "spec": "tiny", "workload": {"batch": 2, "kv_len": 512, "q_len": 1}, "us": us, **figures,
        "rounds": 3,
    }  # fmt: skip


def test_entries_have_a_row_for_each_workload(built: TuningResult, store: Store):
    found = results.entries(store.all())
    assert list(found.key.unique()) == [built.entry.key]
    assert found.set_index("workload")[["us", "default_us", "read_us"]].to_dict("index") == {
        "1x128": {"us": 142.0, "default_us": 184.0, "read_us": 50.0},
        "2x512": {"us": 232.0, "default_us": 284.0, "read_us": 50.0},
    }
    assert list(results.entries([]).columns) == list(found.columns)


def test_trials_are_of_the_latest_study_with_failures_and_importances(built: TuningResult, cache: ArtifactCache, tmp_path: Path):
    trials = results.trials(built.entry.key, cache)
    assert len(trials) == len(built.records) == 17
    large = trials[trials.workload == "2x512"]
    assert (large.us.min(), large.us.notna().sum()) == (232.0, 9)
    assert large.groupby("layout.block").us.min().to_dict() == {32: 232.0, 64: 264.0, 128: 328.0}
    assert trials.seconds.is_monotonic_increasing
    assert trials.seconds[0] == 0.0
    (failed,) = results.failures(trials).to_dict("records")
    assert (failed["kind"], failed["count"], failed["detail"]) == ("crash", 2, "made to fail: crash")
    shares = results.importances(built.entry.key, cache)
    assert shares[shares.workload == "2x512"].share.sum() == pytest.approx(1.0, abs=0.01)
    assert results.trials(built.entry.key, ArtifactCache(tmp_path)).empty


def test_the_page_shows_times_search_and_failures_without_the_network(built: TuningResult, store: Store, cache: ArtifactCache):
    page = render(store.all(), cache=cache)
    for text in ("142 µs (.35)", "232 µs (.22)", "142\u00a0µs", "made to fail: crash", "11 candidates, 2 of them failed", built.entry.key):
        assert text in page
    assert not re.search(r"http|<script|src=", page)
    assert page.count("<svg") == 4
    assert "is not in this machine's cache" in render(store.all(), cache=ArtifactCache(cache.root / "empty"))
    assert "Nothing is registered yet" in render([], cache=cache)


def test_other_libraries_stand_beside_where_they_were_measured_here(
    built: TuningResult, store: Store, cache: ArtifactCache, tmp_path: Path
):
    facts = {**FACTS, "device": built.entry.device["name"]}
    tables = [([row("torch", "sdpa-fp32-gqa", 464.0), row("torch", "sdpa-bf16-gqa", 928.0), row("<b>new", "x", 499.0)], facts)]
    tables += [
        ([row("torch", "sdpa-fp16-gqa", 93.3)], {**facts, "device": "another"}),
        ([row("x", "x", 77.7)], {**facts, "load": "after 1 s"}),
    ]
    for number, (rows, about) in enumerate(tables):
        write_csv(tmp_path / f"{number}.csv", frame(rows, about))
    page = render(store.all(), results.joined([results.measurements(tmp_path / f"{number}.csv") for number in range(3)]), cache)
    assert "464 µs (.01)" in page
    assert "&lt;b&gt;new" in page
    assert "<b>new" not in page
    assert not re.search(r"928 µs|93.3 µs|77.7 µs", page)


def test_the_fastest_of_every_library_and_kind_of_cache_stand_for_it(tmp_path: Path):
    given = [
        row("kvgen", "cuda", 1.0), row("torch", "sdpa-flash-fp16-gqa", 30.0), row("torch", "sdpa-bf16-folded", 20.0),
        row("flashinfer", "batch-decode", 25.0), row("flashinfer", "batch-decode-fp8", 15.0), row("new", "it", 40.0),
    ]  # fmt: skip
    write_csv(tmp_path / "rows.csv", frame(given, FACTS))
    rows = results.measurements(tmp_path / "rows.csv")
    assert list(rows.workload.unique()) == ["2x512"]
    assert list(results.fastest_peers(rows, "bfloat16").label) == ["new bf16", "FlashInfer bf16", "torch bf16", "FlashInfer fp8"]


@pytest.mark.parametrize(
    ("changed", "said"), [({"kv_len": "0"}, "workload '2x0q1' is out of range"), ({"us": "nan"}, "above 0"), ({"us": "fast"}, "could not")]
)
def test_a_row_that_no_measurement_gives_is_refused(tmp_path: Path, changed: dict[str, str], said: str):
    file, table = tmp_path / "rows.csv", frame([row("torch", "x", 10.0), row("torch", "x", 10.0)], FACTS).astype(str)
    table.loc[1, list(changed)] = list(changed.values())
    write_csv(file, table)
    with pytest.raises(KvgenError, match=f"rows.csv is no table.*{said}"):
        results.measurements(file)


@pytest.mark.parametrize("content", [None, b"", b"a,b\n1,2\n", b"\xff\xfe\x00" * 99, "endless"])
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, content: bytes | str | None):
    file = tmp_path / "rows.csv"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content:
        with file.open("w") as opened:
            os.truncate(opened.fileno(), 1 << 40)
    with pytest.raises(KvgenError, match=r"cannot read .*rows.csv|rows.csv is no table"):
        results.measurements(file)


def test_numbers_read_well():
    assert [microseconds(us) for us in (None, 4.96, 999.6, 1234, 2_345_678)] == ["–", "4.96 µs", "1 ms", "1.23 ms", "2.35 s"]
    assert [fraction(one) for one in (None, 0.956, 1.0)] == ["–", ".96", "1.00"]
    assert [factor(one) for one in (None, 1.504, 26.68)] == ["–", "1.50×", "26.7×"]
    assert [count(one) for one in (1, 1024, 3 << 20, 32000)] == ["1", "1K", "3M", "32000"]
