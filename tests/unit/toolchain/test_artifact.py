from __future__ import annotations

from kvgen.toolchain.artifact import KernelResources, Resources
from kvgen.toolchain.ptxas import parse_ptxas, short_names

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN5kvgen4fillILi64EfEEvPT0_i' for 'sm_90a'
ptxas info    : Function properties for _ZN5kvgen4fillILi64EfEEvPT0_i
    48 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 12 registers, used 1 barriers, 48 bytes stack, 256 bytes smem
ptxas info    : Compile time = 1.2 ms
ptxas info    : Compiling entry function '_ZN5kvgen4fillILi128EfEEvPT0_i' for 'sm_90a'
ptxas info    : Function properties for _ZN5kvgen4fillILi128EfEEvPT0_i
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers, 396 bytes cmem[0]
"""


def test_ptxas_log_gives_resources_by_readable_kernel_name() -> None:
    kernels = parse_ptxas(LOG)
    assert kernels == {
        "fill<64, float>": KernelResources(registers=12, spill_bytes=32, shared_bytes=256, stack_bytes=48),
        "fill<128, float>": KernelResources(registers=255, spill_bytes=0, shared_bytes=0, stack_bytes=0),
    }


def test_other_compiler_output_names_no_kernel() -> None:
    assert parse_ptxas("kernel.cu(3): warning #177-D: variable declared but never referenced\n") == {}


def test_names_that_would_collide_stay_whole() -> None:
    names = short_names(["_ZN1a4fillEv", "_ZN1b4fillEv"])
    assert names == ["a::fill()", "b::fill()"]


def test_names_that_are_not_mangled_stay() -> None:
    assert short_names(["main", "_Z4fillv"]) == ["main", "fill"]
    assert short_names([]) == []


def test_worst_kernel_decides_the_spills() -> None:
    assert Resources("nvcc 13.0.88", 2.0, parse_ptxas(LOG)).spill_bytes == 32
    assert Resources("g++ 12.2.0", 2.0).spill_bytes == 0


def test_resources_survive_json() -> None:
    resources = Resources("nvcc 13.0.88", 2.5, parse_ptxas(LOG))
    assert Resources.from_json(resources.to_json()) == resources
