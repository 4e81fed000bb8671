"""Threads of CPU kernels of any operation."""

from __future__ import annotations

import os
from collections.abc import Iterable

from kvgen.arch import Target
from kvgen.runtime import checks
from kvgen.runtime.module import Functions


def set_threads(target: Target, modules: Iterable[Functions], count: int) -> None:
    """Set the threads of the following calls of a kernel's modules. Raises ValueError out of range and for GPU kernels, TypeError for no
    integer.
    """
    if target != "cpu":
        raise ValueError(f"set_threads({count}): threads belong to CPU kernels, and this one is for {target}")
    count = checks.whole("threads", count, 1, os.cpu_count() or 1)
    for module in modules:
        if module.set_threads is not None:
            module.set_threads(count)
