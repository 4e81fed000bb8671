from __future__ import annotations

from collections.abc import Callable

import pytest

from kvgen.errors import MeasureError
from kvgen.measure import timer
from kvgen.measure.measurement import TimingPolicy
from kvgen.measure.timer import CpuTimer, CudaTimer


class FakeClock:
    """A clock that only calls advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.waited = 0.0
        monkeypatch.setattr(timer.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(timer, "waiting_seconds", lambda: self.waited)

    def call(self, seconds: float, log: list[float] | None = None):
        def run() -> None:
            self.now += seconds
            if log is not None:
                log.append(seconds)

        return run


def test_times_are_microseconds_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(monkeypatch)
    samples = CpuTimer().time([clock.call(0.002)], TimingPolicy(seconds=0.02, samples=8))
    assert samples == pytest.approx([2000.0] * 8)


def test_short_calls_are_timed_several_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(monkeypatch)
    log: list[float] = []
    samples = CpuTimer().time([clock.call(1e-5, log)], TimingPolicy(warmup_seconds=1e-4, samples=10))
    assert samples == pytest.approx([10.0] * 10)
    assert len(log) >= 10 * 50


def test_calls_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(monkeypatch)
    logs: list[list[float]] = [[], [], []]
    CpuTimer().time([clock.call(0.001, log) for log in logs], TimingPolicy(seconds=0.03, warmup_seconds=0.0, samples=30))
    assert {len(log) for log in logs} == {11}


def test_samples_that_waited_for_a_cpu_are_retaken(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(monkeypatch)
    calls = iter(range(1000))

    def run() -> None:
        held_up = next(calls) % 3 == 0
        clock.now += 0.009 if held_up else 0.001
        clock.waited += 0.008 if held_up else 0.0

    assert CpuTimer().time([run], TimingPolicy(warmup_seconds=0.02, seconds=0.0081)) == pytest.approx([1000.0] * 8)


def test_a_clock_that_stands_still_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(monkeypatch)
    ticks = iter(range(1000))
    monkeypatch.setattr(timer.time, "perf_counter", lambda: float(next(ticks)) if clock.now == 0 and next(ticks) < 6 else 99.0)
    with pytest.raises(MeasureError, match="did not advance"):
        CpuTimer().time([lambda: None], TimingPolicy(warmup_seconds=0.0))


@pytest.mark.parametrize(("sustained", "wanted"), [(0.0, ["rest", "run", "run"] * 7), (1.0, ["run"] * 15)], ids=["burst", "sustained"])
def test_a_burst_rests_as_long_as_it_runs_and_counts_the_second_run(
    monkeypatch: pytest.MonkeyPatch, sustained: float, wanted: list[str]
) -> None:
    """The first run after a rest is slow. What is sustained has no pauses."""
    log: list[str] = []

    def events(run: Callable[[], object], count: int) -> list[float]:
        taken = []
        for _ in range(count):
            taken.append(0.003 if log and log[-1] == "rest" else 0.002)
            log.append("run")
        return taken

    def sleep(seconds: float) -> None:
        assert seconds == pytest.approx(0.004)
        log.append("rest")

    monkeypatch.setattr(CudaTimer, "_events", staticmethod(events))
    monkeypatch.setattr(timer.time, "sleep", sleep, raising=False)
    policy = TimingPolicy(seconds=0.06, samples=15, sustained_seconds=sustained)
    assert set(CudaTimer._replays(lambda: None, policy, 0.002)) == {0.002}
    assert log == wanted


def test_samples_fit_into_the_time_of_a_policy() -> None:
    policy = TimingPolicy(seconds=0.06, samples=15)
    assert [timer.wanted_samples(policy, each) for each in (0.002, 0.008, 1.0)] == [15, 7, timer.MIN_SAMPLES]
