"""Instruction sets of the CPU back end: narrow registers, and products of 16-bit integers (`dot: int16`) where a schedule asks for them."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvgen._resources import templates
from kvgen.lower.backend import CPU_FLAGS, get_backend
from kvgen.lower.schedule import Params, Schedule, layout_of
from kvgen.runtime.calls import Variant
from kvgen.runtime.module import load
from kvgen.spec import KernelSpec
from kvgen.toolchain import build
from kvgen.toolchain.compilers import CXX_FLAGS, cpu_features, find_gxx
from kvgen.verify import CheckPolicy
from kvgen.verify.check import check
from tests.support.cpu import spec_of, variant

CPU = get_backend("cpu")
POLICY = CheckPolicy(long_tokens=200, steps=1, repeats=2, most_tokens=1 << 11)
X86 = pytest.mark.skipif("avx2" not in cpu_features(), reason="these instruction sets are those of x86-64")


def scheduled(spec: KernelSpec, dot: str) -> Schedule:
    default = CPU.default(spec, "cpu")
    return Schedule("cpu", default.layout, Params({**default.launch, "dot": dot}))


def compiled(spec: KernelSpec, dot: str, *more: str) -> Variant:
    schedule = scheduled(spec, dot)
    source = CPU.lower(spec, schedule, "cpu")
    return Variant(spec, layout_of(spec, schedule.layout), load(build(replace(source, flags=(*source.flags, *more))).path))


@X86
@pytest.mark.parametrize(
    ("spec", "dot", "level"),
    [
        (spec_of(heads="2/1", dim=32, k="2c32+4range", v="4t32", softcap=30.0), "int16", "x86-64-v3"),
        (spec_of(heads="2/1", dim=32, dtype="bfloat16", k="8t16s", v="2c16", cache={"sink": 5, "local": 20}), "fp32", "x86-64"),
    ],
    ids=["boosted-softcap", "bfloat16-per-token"],
)
def test_formats_are_right_in_narrow_registers(spec: KernelSpec, dot: str, level: str) -> None:
    accuracy = check(compiled(spec, dot, "-O1", f"-march={level}"), "cpu", POLICY)  # -O1 takes half of the time
    assert accuracy.get("code_mismatches", 0) == 0


ELEMENTWISE = """
#include "kvgen/simd.hpp"
using namespace kvgen;
void f(float* to, const float* from, float shift) { store(to, exp2(max(load<F32>(from), load<F32>(to)) - shift)); }
"""


@X86
@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64-v4"])
def test_vectors_stay_in_registers(level: str, tmp_path: Path) -> None:
    """GCC keeps its own vectors in memory where they are wider than a register; the softmax took 13 times as long with AVX2."""
    (tmp_path / "f.cpp").write_text(ELEMENTWISE)
    target = [f"-march={level}", f"-I{templates() / 'cpu' / 'include'}"]
    command = [str(find_gxx().path), *CXX_FLAGS, *CPU_FLAGS, *target, "-S", "-o", "-", "f.cpp"]
    text = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "mulps" in text
    assert not re.search(r"\(%r[sb]p\)", text)


INTEGERS = {
    "int8-paged": spec_of(heads="6/2", k="8c48", v="8t64", page=96, q_len=3),
    "boosted": spec_of(dim=80, heads="5/1", k="2c32+4range", v="2t80"),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_products_are_as_right_as_floats(name: str) -> None:
    assert check(variant(INTEGERS[name], (("dot", "int16"), ("block", 96))), "cpu", POLICY).get("code_mismatches", 0) == 0


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"dtype": "float32"}, "too coarse for the error bound of float32"),
        ({"k": "16"}, "integers, they have 16 bits and int4"),
        ({"v": "16"}, "integers, they have int4 and 16 bits"),
        ({"v": "4c32"}, "with V per channel"),
        ({"k": "4t8"}, "K in groups of 8 channels"),
        ({"v": "4t8"}, "V in groups of 8 channels"),
        ({"heads": "1/1", "dim": 1024, "k": "8c32"}, "sums over 1024 channels of 8 bits exceed"),
    ],
)
def test_what_integers_cannot_do_is_refused_by_name(parts: dict[str, Any], reason: str) -> None:
    spec = spec_of(**parts)
    space, schedule = CPU.space(spec, "cpu"), scheduled(spec, "int16")
    (found,) = space.check(schedule)
    assert reason in found
    assert {launch["dot"] for launch in space.launches(schedule.layout, spec.workloads[0])} == {"fp32"}
