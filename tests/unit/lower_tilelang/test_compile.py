"""A covering set lowered and compiled for the three architectures: it builds, and hardly anything spills."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgen.errors import CompileError
from kvgen.toolchain.cache import ArtifactCache
from kvgen.toolchain.compile import build_many
from tests.support.kernel_cases import KernelCase, needs_tilelang

needs_tilelang()
pytestmark = [pytest.mark.nvcc, pytest.mark.slow, pytest.mark.timeout(900)]

KERNEL_CASES = (
    KernelCase("k4v4", backend="tilelang"), KernelCase("k8v8:q4:page128", target="sm89", backend="tilelang"),
    KernelCase("k2v2:token:bf16:sym", target="sm80", backend="tilelang"),
)  # fmt: skip
SPILLED = 128
"""Bytes of spills of a planned program, at most: the numbers of a work tile live through its loop."""


def test_a_covering_set_compiles_without_spills(tmp_path: Path) -> None:
    found: dict[str, object] = {}
    for index, result in build_many([case.source() for case in KERNEL_CASES], cache=ArtifactCache(tmp_path)):
        name = str(KERNEL_CASES[index])
        if isinstance(result, CompileError):
            found[name] = str(result)
            continue
        kernels = result.resources.kernels
        found[name] = [
            kernel for kernel, used in kernels.items() if "attend" in kernel and used.spill_bytes > SPILLED * ("planned" in kernel)
        ]
    assert found == {str(case): [] for case in KERNEL_CASES}
