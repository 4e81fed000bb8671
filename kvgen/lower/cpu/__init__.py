"""The CPU back end: C++17 for g++, vectors of 16 lanes, OpenMP threads."""

from kvgen.lower.cpu.lowering import CpuBackend as backend  # noqa: N813
from kvgen.lower.matrix import CPU as matrix  # noqa: N811

__all__ = ["backend", "matrix"]
