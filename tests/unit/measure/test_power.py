"""Power and clock beside a sustained time, from a fake NVML."""

from __future__ import annotations

import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from kvgen.measure import power


class Nvml:
    """700 W at 1,500 MHz once the clock has fallen from 1,980."""

    NVML_CLOCK_SM = 1
    NVML_FI_DEV_POWER_INSTANT = 186

    def __init__(self, instant: bool = True) -> None:
        self.asked = 0
        self.instant = instant

    def nvmlDeviceGetFieldValues(self, handle, fields):
        return [SimpleNamespace(nvmlReturn=0 if self.instant else 3, value=SimpleNamespace(uiVal=700_000))]

    def nvmlDeviceGetPowerUsage(self, handle):
        return 650_000

    def nvmlDeviceGetClockInfo(self, handle, which):
        self.asked += 1
        return 1980 if self.asked == 1 else 1500


def metered(monkeypatch: pytest.MonkeyPatch, nvml: Nvml | None) -> power.Power:
    @contextmanager
    def device(index):
        yield None if nvml is None else (nvml, "handle")

    monkeypatch.setattr(power, "nvml_device", device)
    monkeypatch.setattr(power, "ask", lambda function, *args: function(*args))
    monkeypatch.setattr(power, "POLL_SECONDS", 0.001)
    with power.metered() as found:
        while nvml is not None and nvml.asked < 4:
            time.sleep(0.001)
    return found


def test_the_settled_half_of_the_readings_counts(monkeypatch):
    found = metered(monkeypatch, Nvml())
    assert (found.watts, found.clock_mhz) == (700.0, 1500.0)


def test_a_driver_without_instant_power_gives_its_average(monkeypatch):
    assert metered(monkeypatch, Nvml(instant=False)).watts == 650.0


def test_without_nvml_nothing_is_told(monkeypatch):
    found = metered(monkeypatch, None)
    assert (found.watts, found.clock_mhz) == (None, None)
