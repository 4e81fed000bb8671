"""Specs and compiled variants of operations on a matrix for tests."""

from __future__ import annotations

from functools import cache
from typing import Any

from kvgen.lower.backend import get_backend
from kvgen.lower.matrix import NO_LAYOUT
from kvgen.lower.schedule import Params, Schedule
from kvgen.runtime.matrix import MatrixVariant, load_matrix
from kvgen.spec import MatrixSpec, load_any_spec
from kvgen.toolchain import build


def matrix_spec(operation: str = "quantize", dtype: str = "float32", arch: str = "cpu", shapes: tuple[str, ...] = ("64x32",)) -> MatrixSpec:
    """A spec of an operation; shapes as tokens x channels."""
    works: list[dict[str, Any]] = [dict(zip(("tokens", "channels"), map(int, shape.split("x")), strict=True)) for shape in shapes]
    spec = load_any_spec({"operation": operation, "arch": arch, "matrix": {"dtype": dtype}, "workloads": works})
    assert isinstance(spec, MatrixSpec)
    return spec


@cache
def cpu_matrix(dtype: str = "float32", rows: int = 16, channels: int = 128) -> MatrixVariant:
    """A compiled schedule of the CPU back end."""
    spec = matrix_spec(dtype=dtype)
    schedule = Schedule("cpu", NO_LAYOUT, Params(rows=rows, channels_per_tile=channels))
    return load_matrix(spec, build(get_backend("cpu").lower(spec, schedule, "cpu")).path)
