"""Facts of the device that a measurement is taken on: its identity, its last-level cache, its power and clock meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from kvgen._machine import cores, llc_bytes
from kvgen._nvml import ask, gpu_identity, nvml_device
from kvgen.arch import Target
from kvgen.digest import digest
from kvgen.toolchain.compilers import cpu_features, cpu_name

CPU_COLD_FACTOR, CPU_COLD_MOST = 8, 512 << 20
CUDA_COLD_FACTOR = 24
"""With 3 to 20 times the L2 some kernels find a part of their inputs there (docs/design.md)."""
POLL_SECONDS = 0.02


def fingerprint(target: Target) -> dict[str, Any]:
    """The device that a target's kernels run on: JSON-able facts that change only when the machine does.

    Of a CPU: kind, name, cores (of this process), features (digest) and last-level cache in bytes. Of a GPU: kind, name, driver,
    capability, SM count, memory, L2 and power limit; facts that neither NVML nor torch reports are left out.
    """
    if target == "cpu":
        features = digest(cpu_features())
        return {"kind": "cpu", "name": cpu_name(), "cores": cores(), "features": features, "llc_bytes": llc_bytes()}
    facts: dict[str, Any] = {"kind": "cuda", **gpu_identity()}
    with nvml_device() as found:
        limit = found and ask(found[0].nvmlDeviceGetEnforcedPowerLimit, found[1])
        if limit:
            facts["power_limit_w"] = limit // 1000
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts.update(name=properties.name, sms=properties.multi_processor_count, memory_bytes=properties.total_memory)
        facts.update(capability=f"{properties.major}.{properties.minor}", llc_bytes=properties.L2_cache_size)
    return facts


def cold_bytes(device: str) -> int:
    """Bytes to touch between two uses of an input, so that it comes from memory: many times the last-level cache.

    The L2 of a GPU may keep a part of what is read again before several times its size was read. A virtual machine often uses more of the
    CPU's cache than it sees.
    """
    if device == "cpu":
        return min(CPU_COLD_FACTOR * llc_bytes(), CPU_COLD_MOST)
    import torch

    return CUDA_COLD_FACTOR * int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


@dataclass
class Power:
    """Medians over a measurement; None where NVML does not tell."""

    watts: float | None = None
    clock_mhz: float | None = None
    """Of the multiprocessors."""


@contextmanager
def metered() -> Iterator[Power]:
    """Read power and clock of the first visible GPU until the end of the block; the yielded object is filled then, with the median of the
    second half of the readings: power and clocks still change in the first.
    """
    power, stop = Power(), threading.Event()
    readings: list[tuple[Any, Any]] = []

    def read(nvml: Any, handle: Any) -> None:
        while not stop.wait(POLL_SECONDS):
            readings.append((_milliwatts(nvml, handle), ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)))

    with nvml_device() as found:
        if found is None:
            yield power
            return
        reader = threading.Thread(target=read, args=found, daemon=True)
        reader.start()
        try:
            yield power
        finally:
            stop.set()
            reader.join()
            settled = readings[len(readings) // 2 :]
            watts, clocks = ([float(one[at]) for one in settled if one[at] is not None] for at in (0, 1))
            power.watts, power.clock_mhz = median(watts) / 1000 if watts else None, median(clocks) if clocks else None


def _milliwatts(nvml: Any, handle: Any) -> int | None:
    """Power now; where the driver has only an average over the last second, that."""
    values = ask(nvml.nvmlDeviceGetFieldValues, handle, [nvml.NVML_FI_DEV_POWER_INSTANT])
    power: int | None = values[0].value.uiVal if values and values[0].nvmlReturn == 0 else ask(nvml.nvmlDeviceGetPowerUsage, handle)
    return power
