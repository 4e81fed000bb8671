"""The CPU back end: C++17 for g++, vectors of 16 lanes, OpenMP threads."""

from __future__ import annotations

from kvgen.lower.base import Backend
from kvgen.lower.cpu.lowering import CpuBackend


def backend() -> Backend:
    """The back end's one instance."""
    return CpuBackend()
