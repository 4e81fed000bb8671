"""Comparisons: turns, records, the CSV file, and what is told of providers that cannot take part."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from kvgen.bench import run
from kvgen.bench.run import Case, Entrant, compare, frame, write_csv
from kvgen.errors import HostError, ToolchainMissing, UnsupportedError
from kvgen.measure.inputs import NoRoom
from kvgen.measure.measurement import TimingPolicy
from kvgen.spec import Workload
from tests.support.tuning import tiny_spec

POLICY = TimingPolicy(seconds=0.001, warmup_seconds=0.0, samples=5, cold_bytes=0)
FACTS = {"load": "burst", "device": "a box", "date": "2026-01-01"}
WORKS = [Workload(batch=batch, kv_len=100) for batch in (1, 2, 3)]


class Fixed:
    """Takes as long as it says, and raises what it is given at a batch of `raises_at`."""

    name, backend = "fixed", "time"

    def __init__(self, us: float = 10.0, error: BaseException | None = None, raises_at: int | None = None) -> None:
        self.us, self.error, self.raises_at, self.rounds = us, error, raises_at, 0

    def prepare(self, case: Case) -> Entrant:
        if self.error is not None and self.raises_at in (None, case.workload.batch):
            raise self.error
        return Entrant(self._sample, 1_000_000, lambda: 1e-4, f"of {case.workload.batch}")

    def _sample(self, policy: TimingPolicy) -> tuple[float, ...]:
        self.rounds += 1
        return (self.us, self.us + self.rounds, self.us - 1)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("kvgen.measure.read_roofline.read_us", lambda target, nbytes, policy: 5.0)
    return []


def compared(
    told: list[str], *providers: Fixed, works: list[Workload] = WORKS[1:2], rounds: int = 1, **options: object
) -> list[run.Record]:
    spec = tiny_spec()
    return compare(spec, "cpu", works, providers, lambda work: 64, policy=POLICY, rounds=rounds, told=told.append, **options)  # type: ignore[arg-type]


def test_records_are_medians_over_turns_beside_a_pure_read(told: list[str]) -> None:
    one = Fixed()
    (record,) = compared(told, one, Fixed(error=UnsupportedError("fixed", "it is Sunday")), rounds=4)
    assert one.rounds == 4
    assert record == {
        "provider": "fixed", "backend": "of 2", "spec": "tiny", "workload": {"batch": 2, "kv_len": 100, "q_len": 1}, "us": 10.0,
        "bytes": 1_000_000, "tb_s": 0.1, "read_us": 5.0, "read_fraction": 0.5, "relative_l2": 1e-4, "watts": None, "clock_mhz": None,
        "rounds": 4,
    }  # fmt: skip
    assert told == ["2x100: fixed: it is Sunday"]


def test_unequal_lengths_and_loads_are_told_apart(told: list[str]) -> None:
    work = tiny_spec(workloads=[{"batch": 2, "kv_len": 100, "lengths": {"min": 20}, "load": "sustained"}]).workloads[0]
    ours = Fixed()
    ours.name = "kvgen"
    records = compared(told, ours, Fixed(), works=[work])
    assert [record["provider"] for record in records] == ["kvgen"]
    assert (records[0]["workload"]["lengths"]["min"], records[0]["workload"]["load"]) == (20, "sustained")
    assert told == ["2x20-100:sustained: fixed: its sequences have one length"]
    row = frame(records, FACTS).iloc[0]
    assert (row.lengths, row.load, row.device) == ("20-100", "after 0.3 s of load", "a box")


def test_what_does_not_fit_or_is_missing_ends_no_other(told: list[str]) -> None:
    full, absent = Fixed(error=NoRoom("the caches take 21 GB, and 3 GB are free"), raises_at=2), ToolchainMissing("it is not installed")
    records = compared(told, Fixed(), full, Fixed(error=absent), Fixed(error=absent), works=WORKS)
    assert [record["workload"]["batch"] for record in records] == [1, 1, 2, 3, 3]
    assert told == ["it is not installed", "the caches take 21 GB, and 3 GB are free"]


def test_an_interrupt_leaves_the_rows_of_the_workloads_before(told: list[str], tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    with pytest.raises(KeyboardInterrupt):
        compared(
            told, Fixed(error=KeyboardInterrupt(), raises_at=3), works=WORKS, kept=lambda records: write_csv(file, frame(records, FACTS))
        )
    table = pd.read_csv(file)
    assert list(table.batch) == [1, 2]
    assert list(table.columns[:8]) == ["provider", "backend", "spec", "batch", "kv_len", "q_len", "lengths", "us"]
    with pytest.raises(HostError, match="cannot write"):
        write_csv(tmp_path / "rows.csv" / "x.csv", table)


@pytest.mark.parametrize(("seconds", "rounds", "left"), [(None, 8, 23.0), (12.0, 4, 11.0), (3.0, 3, 2.0)])
def test_a_budget_takes_rounds_and_every_round_tells_how_long_it_still_takes(
    told: list[str], monkeypatch: pytest.MonkeyPatch, seconds: float | None, rounds: int, left: float
) -> None:
    """A round takes a second, at three workloads."""
    now, seen = [100.0], list[tuple[str, float]]()

    class Slow(Fixed):
        def _sample(self, policy: TimingPolicy) -> tuple[float, ...]:
            now[0] += 1.0
            return super()._sample(policy)

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(run, "SLOW_SECONDS", 99.0)
    records = compared(told, Slow(), works=WORKS, rounds=8, seconds=seconds, watch=lambda *one: seen.append(one))
    assert records[0]["rounds"] == rounds
    assert seen[0] == ("1x100, round 1 of 8", left)
