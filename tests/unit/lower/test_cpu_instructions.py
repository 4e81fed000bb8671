"""The CPU's headers on narrower registers, where a vector is a pair of halves (templates/cpu/include/kvgen/vector.hpp)."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from kvgen._resources import templates
from kvgen.lower import flags
from kvgen.lower.backend import Source, get_backend
from kvgen.lower.schedule import Params, Schedule, layout_of
from kvgen.runtime.module import load
from kvgen.runtime.variant import Variant
from kvgen.spec import KernelSpec
from kvgen.toolchain import build
from kvgen.toolchain.compilers import CXX_FLAGS, cpu_features, find_gxx
from kvgen.verify import CheckPolicy
from kvgen.verify.check import check
from tests.support.cpu import spec_of

CPU = get_backend("cpu")
POLICY = CheckPolicy(long_tokens=200, steps=1, repeats=2, most_tokens=1 << 11)
LEVELS = ("x86-64-v3", "x86-64")
FORMATS = {
    "boosted-softcap": (spec_of(heads="2/1", dim=32, k="2c32+4range", v="4t32", softcap=30.0), "int16"),
    "bfloat16-per-token": (spec_of(heads="2/1", dim=32, dtype="bfloat16", k="8t16s", v="2c16", cache={"sink": 5, "local": 20}), "fp32"),
    "plain-window": (spec_of(heads="2/1", dim=32, k="16", v="4t4", window=50), "fp32"),
}

pytestmark = pytest.mark.skipif("avx2" not in cpu_features(), reason="these instruction sets are those of x86-64")


def lowered(spec: KernelSpec, dot: str, level: str) -> tuple[Schedule, Source]:
    default = CPU.default(spec, "cpu")
    schedule = Schedule("cpu", default.layout, Params({**default.launch, "dot": dot}))
    source = CPU.lower(spec, schedule, "cpu")
    return schedule, replace(source, flags=(*source.flags, "-O1", f"-march={level}"))  # -O1 takes half of the time


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_right_on_every_instruction_set(name: str, level: str) -> None:
    spec, dot = FORMATS[name]
    schedule, source = lowered(spec, dot, level)
    accuracy = check(Variant(spec, layout_of(spec, schedule.layout), load(build(source).path)), "cpu", POLICY)
    assert accuracy.get("code_mismatches", 0) == 0


ELEMENTWISE = """
#include "kvgen/simd.hpp"
using namespace kvgen;
void f(float* to, const float* from, float shift) { store(to, exp2(max(load<F32>(from), load<F32>(to)) - shift)); }
"""


@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64-v4"])
def test_vectors_stay_in_registers(level: str, tmp_path: Path) -> None:
    """GCC keeps its own vectors in memory where they are wider than a register; the softmax took 13 times as long with AVX2."""
    (tmp_path / "f.cpp").write_text(ELEMENTWISE)
    compiler = find_gxx()
    command = [
        str(compiler.path),
        *CXX_FLAGS,
        *flags.CPU,
        f"-march={level}",
        f"-I{templates() / 'cpu' / 'include'}",
        "-S",
        "-o",
        "-",
        "f.cpp",
    ]
    text = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "mulps" in text
    assert not re.search(r"\(%r[sb]p\)", text)
