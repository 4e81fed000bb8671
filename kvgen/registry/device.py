"""The identity of this machine in entries: device name, driver, threads."""

from __future__ import annotations

import platform
from functools import cache
from typing import Any

from kvgen._machine import cores
from kvgen._nvml import gpu_identity
from kvgen.arch import Target
from kvgen.toolchain.compilers import cpu_name


@cache
def here(target: Target) -> dict[str, Any]:
    """Name of the device that the target means here, with the threads of a CPU or the driver of a GPU.

    The name is empty if there is no such device.
    """
    if target == "cpu":
        return {"name": cpu_name(), "threads": cores()}
    return {"name": "", **gpu_identity()}


def origin() -> str:
    """A description of this machine, stored with modules that are exported."""
    from kvgen import __version__

    return f"{cpu_name()} ({platform.machine()}, kvgen {__version__})"
