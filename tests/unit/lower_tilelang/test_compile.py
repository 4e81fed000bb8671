"""The programs of the emulated tests, compiled for the three architectures: they build, and hardly anything spills."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu_words import spec_of, workload_of
from kvgen.arch import GPUS
from kvgen.errors import CompileError
from kvgen.lower.backend import get_backend
from kvgen.toolchain.cache import ArtifactCache
from kvgen.toolchain.compile import build_many
from tests.support.kernel_cases import needs_tilelang
from tests.unit.lower_tilelang.emulate import schedule
from tests.unit.lower_tilelang.test_kernel import CASES

needs_tilelang()
pytestmark = [pytest.mark.nvcc, pytest.mark.slow, pytest.mark.timeout(900)]
SPILLED = 128
"""Bytes of spills of a planned program, at most: the numbers of a work tile live through its loop."""


def test_a_covering_set_compiles_without_spills(tmp_path: Path) -> None:
    sources = [
        get_backend("tilelang").lower(spec_of(words, target, [workload_of("2x512")]), schedule(block, **changes), target)
        for (words, block, changes), target in zip(CASES, GPUS, strict=False)
    ]
    for index, result in build_many(sources, cache=ArtifactCache(tmp_path)):
        assert not isinstance(result, CompileError), result
        used = {name: one.spill_bytes for name, one in result.resources.kernels.items() if "attend" in name}
        assert all(spills <= SPILLED * ("planned" in name) for name, spills in used.items()), (CASES[index], used)
