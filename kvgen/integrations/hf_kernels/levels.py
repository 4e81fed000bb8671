"""The processors that an exported CPU library is compiled for: levels of an instruction set instead of this machine's own."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from kvgen.errors import UnsupportedError

AVX2 = ("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")
AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


@dataclass(frozen=True)
class CpuLevel:
    """One level: its name, what the compiler is told after `-march=native`, and the instructions as /proc/cpuinfo names them."""

    name: str
    flags: tuple[str, ...]
    instructions: tuple[str, ...] = ()


LEVELS = {
    "x86_64": (
        CpuLevel("x86-64-v4-vnni", ("-march=x86-64-v4", "-mavx512vnni"), (*AVX2, *AVX512, "avx512_vnni")),
        CpuLevel("x86-64-v4", ("-march=x86-64-v4",), (*AVX2, *AVX512)),
        CpuLevel("x86-64-v3", ("-march=x86-64-v3",), AVX2),
    ),
    "aarch64": (CpuLevel("armv8-a", ("-march=armv8-a",)),),
}
"""By `platform.machine()`, the newest first: a library is taken that this order offers first."""


def cpu_levels() -> tuple[CpuLevel, ...]:
    """The levels of this machine's kind of processor. Raises UnsupportedError for a kind without any."""
    kind = platform.machine()
    if kind not in LEVELS:
        reason = f"this processor is {kind}, and libraries are exported for {' and '.join(LEVELS)}"
        raise UnsupportedError("export for the CPU", reason, is_backend=False)
    return LEVELS[kind]
