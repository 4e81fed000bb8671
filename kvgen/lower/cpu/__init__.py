"""The CPU back end: C++17 for g++, vectors of 16 lanes, OpenMP threads."""

from __future__ import annotations

from kvgen.lower.backend import Lowering
from kvgen.lower.cpu.lowering import CpuBackend
from kvgen.lower.matrix import CPU
from kvgen.spec import KernelSpec, MatrixSpec


def backend() -> Lowering[KernelSpec]:
    """Attention."""
    return CpuBackend()


def matrix() -> Lowering[MatrixSpec]:
    """Operations on a matrix."""
    return CPU
