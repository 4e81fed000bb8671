"""Facts of the device that a measurement was taken on, and of conditions that could disturb it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kvgen._machine import available_bytes, cores, llc_bytes
from kvgen._nvml import ask, gpu_identity, nvml_device
from kvgen.arch import Target
from kvgen.digest import digest
from kvgen.toolchain.compilers import cpu_features, cpu_name

if TYPE_CHECKING:
    import torch

CPU_COLD_FACTOR, CPU_COLD_MOST = 8, 512 << 20
CUDA_COLD_FACTOR = 24
"""With 3 to 20 times the L2 some kernels find a part of their inputs there (docs/design.md)."""


def fingerprint(target: Target, index: int = 0) -> dict[str, Any]:
    """The device that a target's kernels run on: JSON-able facts that change only when the machine does."""
    return cpu_fingerprint() if target == "cpu" else gpu_fingerprint(index)


def cpu_fingerprint() -> dict[str, Any]:
    """kind, name, cores (of this process), features (digest) and last-level cache in bytes."""
    return {
        "kind": "cpu",
        "name": cpu_name(),
        "cores": cores(),
        "features": digest(cpu_features()),
        "llc_bytes": llc_bytes(),
    }


def gpu_fingerprint(index: int = 0) -> dict[str, Any]:
    """kind, name, driver, capability, SM count, memory, L2 and clocks; facts that neither NVML nor torch reports are left out."""
    facts: dict[str, Any] = {"kind": "cuda", **gpu_identity(index)}
    with nvml_device(index) as found:
        if found is not None:
            nvml, handle = found
            facts.update(sm_clock_mhz=ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM))
            facts.update(memory_clock_mhz=ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_MEM))
            facts.update(power_limit_w=(ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle) or 0) // 1000 or None)
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(index)
        facts.update(name=properties.name, sms=properties.multi_processor_count, memory_bytes=properties.total_memory)
        facts.update(capability=f"{properties.major}.{properties.minor}", llc_bytes=properties.L2_cache_size)
    return {name: value for name, value in facts.items() if value is not None}


def conditions(target: Target, index: int = 0) -> dict[str, Any]:
    """Conditions that could disturb a measurement now: other load, other processes on the GPU, throttling. Empty if there are none."""
    notes: dict[str, Any] = {}
    load = os.getloadavg()[0]
    if load > cores() + 0.5:
        notes["load"] = round(load, 1)
    if target != "cpu":
        with nvml_device(index) as found:
            if found is not None:
                notes.update(_gpu_notes(*found))
    return notes


def _gpu_notes(nvml: Any, handle: Any) -> dict[str, Any]:
    notes: dict[str, Any] = {}
    others = [p.pid for p in ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or () if p.pid != os.getpid()]
    if others:
        notes["other_processes"] = len(others)
    harmless = nvml.nvmlClocksThrottleReasonGpuIdle | nvml.nvmlClocksThrottleReasonApplicationsClocksSetting
    reasons = (ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0) & ~harmless
    if reasons:
        notes["throttle_reasons"] = hex(reasons)
    return notes


def free_bytes(device: torch.device) -> int:
    """Free memory in bytes; on a GPU also what torch has cached, and gives back to the driver when an allocation fails."""
    if device.type != "cuda":
        return available_bytes()
    import torch

    return int(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def cold_bytes(device: str) -> int:
    """Bytes to touch between two uses of an input, so that it comes from memory: many times the last-level cache.

    The L2 of a GPU may keep a part of what is read again before several times its size was read. A virtual machine often uses more of the
    CPU's cache than it sees.
    """
    if device == "cpu":
        return min(CPU_COLD_FACTOR * llc_bytes(), CPU_COLD_MOST)
    import torch

    return CUDA_COLD_FACTOR * int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)
