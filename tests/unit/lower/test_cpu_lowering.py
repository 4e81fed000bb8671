"""Specs to C++: what is refused, that defaults are in the space, headers without warnings."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from kvgen.errors import UnsupportedError
from kvgen.lower.backend import get_backend
from kvgen.lower.schedule import Params, Schedule, layout_of
from kvgen.spec import KernelSpec, load_spec
from kvgen.toolchain.compilers import find_gxx
from tests.support.specs import base, specs

CPU = get_backend("cpu")


def spec_of(**sections: Any) -> KernelSpec:
    return load_spec(base(**sections))


def test_what_it_cannot_do_is_refused_by_name() -> None:
    boosted = {
        "attention": {"q_heads": 1, "kv_heads": 1, "head_dim": 512},
        "key": {"bits": 2, "axis": "channel", "group": 32, "boost": {"fraction": 0.25}},
    }
    for sections, reason in ((boosted, "key.boost"), ({"key": {"bits": 4, "axis": "channel", "group": 4096}}, "blocks of 4096 tokens")):
        assert reason in str(CPU.unsupported(spec_of(**sections), "cpu"))
        with pytest.raises(UnsupportedError, match="the cpu back end does not support this spec"):
            CPU.lower(spec_of(**sections), Schedule("cpu", Params(), Params()), "cpu")
    spec = spec_of()
    assert CPU.unsupported(spec, "sm90") == "it generates code for the CPU, not for sm90"
    default = CPU.default(spec, "cpu")
    with pytest.raises(UnsupportedError, match="block = 48 is not one of"):
        CPU.lower(spec, Schedule("cpu", Params(block=48, order="simd"), default.launch), "cpu")


@settings(max_examples=60)
@given(specs())
def test_a_spec_is_refused_or_its_default_is_in_its_space(spec: KernelSpec) -> None:
    if CPU.unsupported(spec, "cpu"):
        return
    space, default = CPU.space(spec, "cpu"), CPU.default(spec, "cpu")
    assert space.check(default) == []
    layout = layout_of(spec, default.layout)
    assert layout.tokens == default.layout["block"]
    assert layout.order == "simd"
    assert default.layout in space.layouts()
    for work in spec.workloads:
        assert space.launches(default.layout, work)


@pytest.mark.parametrize("name", ["module.hpp", "matrix.hpp", "softcap.hpp"])
def test_headers_compile_without_warnings(name: str, tmp_path: Path) -> None:
    source = CPU.lower(spec_of(), CPU.default(spec_of(), "cpu"), "cpu")
    (tmp_path / "alone.cpp").write_text(f'#include "kvgen/{name}"\n')
    alone = replace(source, flags=(*source.flags, "-fsyntax-only", "-Wall", "-Wextra", "-Werror"))
    done = subprocess.run(find_gxx().command(alone, tmp_path / "alone.cpp", tmp_path / "none"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
