"""Power and clock of the GPU while a candidate runs: NVML's, read beside a sustained measurement."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from kvgen._nvml import ask, nvml_device

POLL_SECONDS = 0.02
SETTLED = 0.5
"""The first half of the readings is left out: power and clocks still change then."""


@dataclass
class Power:
    """Medians over a measurement; None where NVML does not tell."""

    watts: float | None = None
    clock_mhz: float | None = None
    """Of the multiprocessors."""


@contextmanager
def metered(index: int = 0) -> Iterator[Power]:
    """Read power and clock of a visible GPU until the end of the block; the yielded object is filled then."""
    power, stop = Power(), threading.Event()
    with nvml_device(index) as found:
        if found is None:
            yield power
            return
        watts: list[float] = []
        clocks: list[float] = []
        reader = threading.Thread(target=_read, args=(*found, stop, watts, clocks), daemon=True)
        reader.start()
        try:
            yield power
        finally:
            stop.set()
            reader.join()
            power.watts, power.clock_mhz = _settled(watts), _settled(clocks)


def _read(nvml: Any, handle: Any, stop: threading.Event, watts: list[float], clocks: list[float]) -> None:
    while True:
        milliwatts, clock = _milliwatts(nvml, handle), ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
        if milliwatts is not None:
            watts.append(milliwatts / 1000)
        if clock is not None:
            clocks.append(float(clock))
        if stop.wait(POLL_SECONDS):
            return


def _milliwatts(nvml: Any, handle: Any) -> float | None:
    """Power now; where the driver has only an average over the last second, that."""
    instant: Callable[..., Any] | None = getattr(nvml, "nvmlDeviceGetFieldValues", None)
    field = getattr(nvml, "NVML_FI_DEV_POWER_INSTANT", None)
    if instant is not None and field is not None:
        values = ask(instant, handle, [field])
        if values and values[0].nvmlReturn == 0:
            return float(values[0].value.uiVal)
    average = ask(nvml.nvmlDeviceGetPowerUsage, handle)
    return None if average is None else float(average)


def _settled(readings: list[float]) -> float | None:
    kept = readings[int(SETTLED * len(readings)) :]
    return median(kept) if kept else None
