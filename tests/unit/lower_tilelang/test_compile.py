"""A covering set lowered and compiled for the three architectures: it builds, and hardly anything spills."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgen.errors import CompileError
from kvgen.toolchain.cache import ArtifactCache
from kvgen.toolchain.compile import build_many
from tests.support.kernel_cases import KernelCase
from tests.support.tilelang import needs_tilelang

needs_tilelang()


pytestmark = [
    pytest.mark.nvcc,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

KERNEL_CASES = (
    KernelCase("k4v4", backend="tilelang"), KernelCase("k2v2", "w16u4s4.cl", backend="tilelang"),
    KernelCase("k4v4:token:kg32:vg32:page64", target="sm89", backend="tilelang"),
    KernelCase("k16v4:bf16:h16/1:sinks", target="sm80", backend="tilelang"),
    KernelCase("k2v4:token:q4:h4/2:page128:cap30:window100", target="sm80", backend="tilelang"),
)  # fmt: skip


SPILLED = 256
"""Bytes of spills of a planned program, at most: where the static one has all registers, the numbers of a work tile are too many."""


def test_a_covering_set_compiles_without_spills(tmp_path: Path) -> None:
    found: dict[str, object] = {}
    for index, result in build_many([case.source() for case in KERNEL_CASES], cache=ArtifactCache(tmp_path)):
        name = str(KERNEL_CASES[index])
        if isinstance(result, CompileError):
            found[name] = str(result)
            continue
        kernels = result.resources.kernels
        found[name] = [kernel for kernel, used in kernels.items() if used.spill_bytes > (SPILLED if "planned" in kernel else 0)]
    assert found == {str(case): [] for case in KERNEL_CASES}


@pytest.mark.parametrize(("case", "complemented"), [(KERNEL_CASES[1], True), (KernelCase("k8v8:vchannel", backend="tilelang"), False)])
def test_one_instruction_masks_and_complements_the_codes_of_v(case: KernelCase, complemented: bool) -> None:
    """Written out in C it takes two, a tenth of the instructions of the loop (docs/design.md)."""
    text = case.source().text
    assert ("kvgen::ptx::not_and_or(" in text) == complemented
    assert "(~words[" not in text
