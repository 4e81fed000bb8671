from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from kvgen.measure import timer
from kvgen.measure.measurement import TimingPolicy
from kvgen.measure.timer import CpuTimer, CudaTimer, cold_bytes


class FakeClock:
    """A clock that only calls advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.waited = 0.0
        monkeypatch.setattr(timer.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(timer, "waiting_seconds", lambda: self.waited)

    def call(self, seconds: float, log: list[float]):
        def run() -> None:
            self.now += seconds
            log.append(seconds)

        return run


@pytest.mark.parametrize(("seconds", "policy", "least"), [(0.002, TimingPolicy(seconds=0.02), 8), (1e-5, TimingPolicy(samples=8), 400)])
def test_times_are_microseconds_per_call_and_short_calls_are_timed_several_at_once(monkeypatch, seconds, policy, least) -> None:
    logs: list[list[float]] = [[], []]
    clock = FakeClock(monkeypatch)
    samples = CpuTimer().time([clock.call(seconds, log) for log in logs], policy)
    assert samples == pytest.approx([seconds * 1e6] * len(samples))
    assert len(samples) >= 5
    assert len(logs[0]) + len(logs[1]) >= least
    assert abs(len(logs[0]) - len(logs[1])) <= 2, "calls take turns"


def test_samples_that_waited_for_a_cpu_are_retaken(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(monkeypatch)
    calls = iter(range(1000))

    def run() -> None:
        held_up = next(calls) % 3 == 0
        clock.now += 0.009 if held_up else 0.001
        clock.waited += 0.008 if held_up else 0.0

    assert CpuTimer().time([run], TimingPolicy(warmup_seconds=0.02, seconds=0.0081)) == pytest.approx([1000.0] * 8)


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


@pytest.mark.parametrize("llc", [1 << 20, 32 << 20, 480 << 20])
def test_inputs_rotate_past_the_last_cache(monkeypatch: pytest.MonkeyPatch, llc: int) -> None:
    monkeypatch.setenv("KVGEN_MACHINE", json.dumps({"llc_bytes": llc}))
    assert cold_bytes("cpu") > llc
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(L2_cache_size=llc))
    assert cold_bytes("cuda") >= 20 * llc


class Nvml:
    """700 W at 1,500 MHz once the clock has fallen from 1,980; 650 W in the average over a second."""

    NVML_CLOCK_SM = 1
    NVML_FI_DEV_POWER_INSTANT = 186

    def __init__(self, instant: bool = True) -> None:
        self.asked, self.instant = 0, instant

    def nvmlDeviceGetFieldValues(self, handle, fields):
        return [SimpleNamespace(nvmlReturn=0 if self.instant else 3, value=SimpleNamespace(uiVal=700_000))]

    def nvmlDeviceGetPowerUsage(self, handle):
        return 650_000

    def nvmlDeviceGetClockInfo(self, handle, which):
        self.asked += 1
        return 1980 if self.asked == 1 else 1500


@pytest.mark.parametrize(("nvml", "wanted"), [(Nvml(), (700.0, 1500.0)), (Nvml(instant=False), (650.0, 1500.0)), (None, (None, None))])
def test_the_settled_half_of_the_readings_of_power_and_clock_counts(monkeypatch: pytest.MonkeyPatch, nvml, wanted) -> None:
    @contextmanager
    def opened():
        yield None if nvml is None else (nvml, "handle")

    monkeypatch.setattr(timer, "nvml_device", opened)
    monkeypatch.setattr(timer, "ask", lambda function, *args: function(*args))
    monkeypatch.setattr(timer, "POLL_SECONDS", 0.001)
    with timer.metered() as found:
        while nvml is not None and nvml.asked < 4:
            time.sleep(0.001)
    assert (found.watts, found.clock_mhz) == wanted
