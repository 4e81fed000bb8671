"""The CTAs that a multiprocessor holds: as many as the schedule says, however few registers and however little memory they need."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from kvgen.arch import CTA_RESERVED, GPUS, Target
from tests.unit.lower_cuda.emulate import library

CALLS = """
#include "kvgen/host/launch.cuh"
extern "C" int of_one_in(int all, int reserved, int ctas, int bytes) { return kvgen::SharedMemory{all, reserved}.of_one_in(ctas, bytes); }
extern "C" int of_unknown_device(int ctas, int bytes) { return kvgen::SharedMemory::of_device().of_one_in(ctas, bytes); }
"""


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(str(library(CALLS, Path(tmp_path_factory.mktemp("occupancy")))))


@pytest.mark.parametrize("target", list(GPUS))
@pytest.mark.parametrize("ctas", [1, 2, 3, 4])
def test_shared_memory_holds_as_many_ctas_as_the_schedule_says(memory: ctypes.CDLL, target: Target, ctas: int) -> None:
    gpu = GPUS[target]
    most = gpu.shared_per_sm // ctas - CTA_RESERVED
    for needed in (0, 4096, 20_000, most // 2, most // 128 * 128):
        given = memory.of_one_in(gpu.shared_per_sm, CTA_RESERVED, ctas, needed)
        assert needed <= given <= gpu.shared_per_cta
        assert gpu.shared_per_sm // (given + CTA_RESERVED) == ctas


def test_a_device_that_does_not_tell_its_memory_gives_what_is_needed(memory: ctypes.CDLL) -> None:
    assert memory.of_unknown_device(2, 5000) == 5000
