from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvgen import __version__, results
from kvgen.registry import Store
from kvgen.registry.store import Found
from kvgen.results import factor, fraction, microseconds, render
from kvgen.toolchain import ArtifactCache
from kvgen.tune.budget import Budget
from kvgen.tune.tuner import TuningResult, tune
from tests.support.tuning import FakeBackend, FakeRunner, compile_nothing, tiny_spec


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


def test_entries_have_a_row_for_each_workload(built: TuningResult, store: Store):
    found = results.entries(store.all())
    assert list(found.key.unique()) == [built.entry.key]
    assert found.set_index("workload")[["us", "default_us", "read_us"]].to_dict("index") == {
        "1x128": {"us": 142.0, "default_us": 184.0, "read_us": 50.0},
        "2x512": {"us": 232.0, "default_us": 284.0, "read_us": 50.0},
    }
    assert list(results.entries([]).columns) == list(found.columns)


def test_trials_are_of_the_latest_study_with_their_failures(built: TuningResult, cache: ArtifactCache, tmp_path: Path):
    trials = results.trials(built.entry.key, cache)
    assert len(trials) == len(built.records) == 17
    large = trials[trials.workload == "2x512"]
    assert (large.us.min(), large.us.notna().sum()) == (232.0, 9)
    assert large.groupby("layout.block").us.min().to_dict() == {32: 232.0, 64: 264.0, 128: 328.0}
    assert trials.seconds.is_monotonic_increasing
    assert trials.seconds[0] == 0.0
    (failed,) = results.failures(trials).to_dict("records")
    assert (failed["kind"], failed["count"], failed["detail"]) == ("crash", 2, "made to fail: crash")
    assert results.trials(built.entry.key, ArtifactCache(tmp_path)).empty


def test_the_page_shows_times_search_and_failures_without_the_network(built: TuningResult, store: Store, cache: ArtifactCache):
    page = render(store.all(), cache=cache)
    for text in ("142 µs (.35)", "232 µs (.22)", "142\u00a0µs", "made to fail: crash", "11 candidates, 2 of them failed", built.entry.key):
        assert text in page
    assert not re.search(r"http|src=", page)
    assert page.count("<svg") == 5
    launches, fleet = (
        re.sub(r"<[^>]*>", " ", page.partition(f"<h2>{title}")[2].partition("</table>")[0]) for title in ("Launches", "Entries")
    )
    assert re.search(r"tiny +1x128 +142\u00a0µs +\.35 +1\.30× +[\d.]+% *\n", launches)
    assert re.search(rf"tiny +tuned , cpu, kvgen {re.escape(__version__)}, \d{{4}}-\d\d-\d\d", fleet)
    assert "is not in this machine's cache" in render(store.all(), cache=ArtifactCache(cache.root / "empty"))
    assert "Nothing is registered yet" in render([], cache=cache)


def test_devices_stand_side_by_side_and_what_one_lacks_is_a_dash(built: TuningResult):
    entry = built.entry
    here, there = (replace(entry, device={**entry.device, "name": name}) for name in ("GPU A", "GPU B"))
    there = replace(there, timings=(replace(entry.timings[0], us=100.0),), launches=tuple(
        replace(launch, workloads=tuple(key for key in launch.workloads if key == "1x128")) for launch in entry.launches
    ))  # fmt: skip
    found = [Found(one.key, "user", Path("entry.json"), one) for one in (here, there)]
    rows = [re.sub(r"<[^>]*>", " ", row) for row in re.findall(r"<tr>.*</tr>", render(found))]
    (both,), (alone,) = ([row for row in rows if work in row] for work in ("1x128", "2x512"))
    assert ("142\u00a0µs" in both, "100\u00a0µs" in both) == (True, True)
    assert alone.rstrip().endswith("–")
    assert results.entries(found).groupby("device").bytes.first().to_dict() == {
        "GPU A": 8704.0,
        "GPU B": 8704.0,
    }  # 3 blocks of 1536, 16 tokens of 256


def test_entries_of_one_device_for_one_workload_are_all_shown_and_an_outdated_one_has_no_bytes(built: TuningResult):
    entry = built.entry
    other = replace(entry, spec=replace(entry.spec, workloads=entry.spec.workloads[:1]), timings=(replace(entry.timings[0], us=100.0),))
    other = replace(other, layout_id="0123456789abcdef", launches=tuple(
        replace(launch, workloads=tuple(key for key in launch.workloads if key == "1x128")) for launch in entry.launches
    ))  # fmt: skip
    found = [Found(one.key, "user", Path("entry.json"), one) for one in (entry, other)]
    page = render(found)
    assert all(f"{us}\u00a0µs" in page for us in (142, 100))
    assert results.entries(found).set_index("us").bytes.isna()[[142.0, 100.0]].tolist() == [False, True]


def test_numbers_read_well():
    assert [microseconds(us) for us in (None, 4.96, 999.6, 1234, 2_345_678)] == ["–", "4.96 µs", "1 ms", "1.23 ms", "2.35 s"]
    assert [fraction(one) for one in (None, 0.956, 1.0)] == ["–", ".96", "1.00"]
    assert [factor(one) for one in (None, 1.504, 26.68)] == ["–", "1.50×", "26.7×"]
