"""The CUDA kernels of linear layers, run by the emulator: right, the same bits in every order of CTAs, and without races."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgen.spec import LinearSpec
from kvgen.verify import CheckPolicy
from kvgen.verify.linear import LinearCheck
from tests.mutants.cases import CASES
from tests.unit.lower_cuda import race_checks
from tests.unit.lower_cuda.emulate_linear import compiled, emulated

VARIANTS = {name: case for name, case in CASES["cuda"].items() if isinstance(case.spec, LinearSpec)}
CHECKED = ("linear-cluster", "linear-wide-cluster")
"""Those that are looked at for races, which takes most of the time."""


@pytest.mark.parametrize("name", VARIANTS)
def test_emulated_kernels(name: str, tmp_path: Path) -> None:
    spec, schedule = VARIANTS[name].spec, VARIANTS[name].schedule
    assert isinstance(spec, LinearSpec)
    with race_checks.enabled(name in CHECKED and race_checks.unsupported() is None):
        variant = emulated(spec, schedule, compiled(spec, schedule, tmp_path))
    check = LinearCheck(variant, "cpu", CheckPolicy(repeats=2))
    check.prepare()
    check.run()
    assert race_checks.reports(tmp_path) == []
