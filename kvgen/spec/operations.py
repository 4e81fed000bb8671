"""Specs and workloads of any operation: attention over a cache, or an operation on a matrix."""

from __future__ import annotations

from kvgen.spec.matrix import MatrixShape, MatrixSpec
from kvgen.spec.model import KernelSpec, Workload

AnySpec = KernelSpec | MatrixSpec
AnyWorkload = Workload | MatrixShape


def shape_of(workload: AnyWorkload) -> dict[str, int]:
    """The numbers of a workload by the names that search spaces know them by."""
    if isinstance(workload, MatrixShape):
        return {"tokens": workload.tokens, "channels": workload.channels}
    return {"batch": workload.batch, "kv_len": workload.kv_len, "q_len": workload.q_len}
