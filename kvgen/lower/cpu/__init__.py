"""The CPU back end: C++17 for g++, vectors of 16 lanes, OpenMP threads."""

from kvgen.lower import linear, matrix
from kvgen.lower.cpu.lowering import CpuBackend as backend  # noqa: N813
from kvgen.spec import LinearSpec, MatrixSpec

__all__ = ["backend", "operations"]

operations = {MatrixSpec: matrix.CPU, LinearSpec: linear.CPU}
"""Lowerings of other operations than attention, by the kind of their specs."""
