"""The emulator's checks: they report what CUDA does not order and what is misaligned, and nothing else."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

from kvgen._resources import templates
from tests.lives.emulated import emulated
from tests.lives.run import lives
from tests.unit.lower_cuda import race_checks
from tests.unit.lower_cuda.emulate import library

pytestmark = pytest.mark.skipif(race_checks.unsupported() is not None, reason=str(race_checks.unsupported()))

BEGIN = """
#include "kvgen/ptx.cuh"
using namespace kvgen;
int lane() { return static_cast<int>(threadIdx.x) % 32; }
int cta() { return static_cast<int>(blockIdx.x); }
int* words() { return reinterpret_cast<int*>(emulator::shared); }
alignas(16) int memory[256];
template <class Kernel>
void run(int ctas, int threads, Kernel kernel, bool overlaps = false) { emulator::launch(dim3(ctas), threads, kernel, 1, overlaps); }
extern "C" void call(int number, int* global) {
  emulator::first_load_is_current = true;
  switch (number) {
"""
KERNELS: dict[str, tuple[str, str]] = {
    "a CTA's barrier orders": (
        "run(1, 64, [&] { words()[threadIdx.x] = 1; __syncthreads(); volatile int x = words()[63 - threadIdx.x]; });",
        "",
    ),
    "a warp's barrier orders no other warp": (
        "run(1, 64, [&] { words()[threadIdx.x] = 1; __syncwarp(); volatile int x = words()[63 - threadIdx.x]; });",
        "race in shared memory, of one CTA: ",
    ),
    "a warp's barrier orders its lanes": (
        "run(1, 64, [&] { words()[threadIdx.x] = 1; __syncwarp(); volatile int x = words()[threadIdx.x ^ 1]; });",
        "",
    ),
    "a shuffle orders nothing": (
        "run(1, 32, [&] { words()[lane()] = 1; __shfl_xor_sync(~0u, 1, 1); volatile int x = words()[lane() ^ 1]; });",
        "race in shared memory, of one CTA: ",
    ),
    "CTAs that write one word": ("run(2, 1, [&] { global[0] = cta(); });", "race in global memory, of two CTAs: "),
    "arrivals release and acquire": (
        "global[0] = 0; run(2, 1, [&] { global[4 + cta()] = 1; if (ptx::arrive(global) == 1) volatile int x = global[4] + global[5]; });",
        "",
    ),
    "relaxed atomics do not": (
        "global[0] = 0; run(2, 1, [&] { global[4 + cta()] = 1; if (atomicAdd(global, 1) == 1) volatile int x = global[4] + global[5]; });",
        "race in global memory, of two CTAs: ",
    ),
    "a copy that is waited for": (
        "run(1, 32, [&] { ptx::copy_async<4>(lane() * 4, memory + lane()); ptx::copy_wait_all(); volatile int x = words()[lane()]; });",
        "",
    ),
    "a copy that is not": (
        "run(1, 32, [&] { ptx::copy_async<4>(lane() * 4, memory + lane()); ptx::copy_commit(); volatile int x = words()[lane()]; });",
        "race in shared memory, of one CTA: ",
    ),
    "a copy that another lane waited for": (
        "run(1, 32, [&] { ptx::copy_async<4>(lane() * 4, memory + lane()); ptx::copy_wait_all(); volatile int x = words()[lane() ^ 1]; });",
        "race in shared memory, of one CTA: ",
    ),
    "a load before griddepcontrol.wait": (
        "run(1, 1, [&] { volatile int x = global[0]; ptx::griddepcontrol_wait(); }, true);",
        "global memory before griddepcontrol.wait: read",
    ),
    "a vector at a multiple of half its size": (
        "run(1, 1, [&] { *reinterpret_cast<uint4*>(global + 2) = uint4{1, 2, 3, 4}; });",
        "misaligned access at emulated.cpp",
    ),
    "a shared vector at a multiple of half its size": (
        "run(1, 1, [&] { ptx::load_shared16(8); });",
        "misaligned read at emulated.cpp",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """What the checks report of a kernel."""
    folder = tmp_path_factory.mktemp("kernels")
    cases = "".join(f"    case {number}: {{ {text} break; }}\n" for number, (text, _) in enumerate(KERNELS.values()))
    with race_checks.enabled():
        built = ctypes.CDLL(str(library(f"{BEGIN}{cases}  }}\n}}\n", folder)))

    def reports(name: str) -> list[str]:
        built.call(list(KERNELS).index(name), (ctypes.c_int * 64)())
        return race_checks.reports(folder)

    return reports


@pytest.mark.parametrize("name", KERNELS)
def test_what_is_reported(name: str, found: Callable[[str], list[str]]) -> None:
    reports, expected = found(name), KERNELS[name][1]
    assert bool(reports) == bool(expected), reports
    assert all(report.startswith(expected) and "emulated.cpp:" in report for report in reports)


@pytest.mark.slow
def test_a_life_has_no_races() -> None:
    assert lives(emulated, 4, [0], races=True).failures == []


def test_harmless_lines_are_still_there() -> None:
    """A line that was changed has to be judged again."""
    headers = [path.read_text() for path in (templates() / "cuda").rglob("*.cuh")]
    for known in race_checks.HARMLESS:
        assert all(any(line in text for text in headers) for line in known.lines)
