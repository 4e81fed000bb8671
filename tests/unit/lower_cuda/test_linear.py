"""The CUDA kernels of linear layers, run by the emulator: right, the same bits in every order of CTAs, and without races."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvgen.runtime.linear import LinearVariant
from kvgen.spec import LinearSpec
from kvgen.verify import CheckPolicy
from kvgen.verify.linear import Case, LinearCheck, LinearWorkloadCheck
from tests.mutants.cases import CASES
from tests.unit.lower_cuda import race_checks
from tests.unit.lower_cuda.emulate_linear import compiled, emulated

VARIANTS = {name: case for name, case in CASES["cuda"].items() if isinstance(case.spec, LinearSpec)}
CHECKED = ("linear-cluster", "linear-multicast-split", "linear-wide")
"""Those that are looked at for races, in two calls of all rows alone, since that takes long."""


def variant_of(name: str, folder: Path) -> LinearVariant:
    spec, schedule = VARIANTS[name].spec, VARIANTS[name].schedule
    assert isinstance(spec, LinearSpec)
    return emulated(spec, schedule, compiled(spec, schedule, folder))


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in CHECKED])
def test_emulated_kernels(name: str, tmp_path: Path) -> None:
    check = LinearCheck(variant_of(name, tmp_path), "cpu", CheckPolicy(repeats=2))
    check.prepare()
    check.run()


@pytest.mark.parametrize("name", ["linear-cluster", "linear-many", "linear-wide"])
def test_a_row_depends_on_no_other(name: str, tmp_path: Path) -> None:
    """Its bits are the same however many others there are, and at every place among them."""
    variant = variant_of(name, tmp_path)
    case = Case(variant, "cpu", variant.rows)
    residual = case.residual

    def rows(chosen: torch.Tensor) -> torch.Tensor:
        return variant(case.x[chosen], case.packed, case.bias, None if residual is None else residual[chosen])

    everything = torch.arange(variant.rows)
    whole = rows(everything)
    for chosen in (everything[:1], everything[3:12], everything.flip(0)):
        assert torch.equal(rows(chosen), whole[chosen])


@pytest.mark.skipif(race_checks.unsupported() is not None, reason=str(race_checks.unsupported()))
@pytest.mark.parametrize("name", CHECKED)
def test_emulated_kernels_have_no_races(name: str, tmp_path: Path) -> None:
    with race_checks.enabled():
        variant = variant_of(name, tmp_path)
    check = LinearCheck(variant, "cpu")
    check.prepare()
    at_all = LinearWorkloadCheck(variant, name, check.case)
    at_all.run()
    at_all.again()  # against the order of CTAs
    assert race_checks.reports(tmp_path) == []
