"""Plans made by the CUDA plan kernel, run in the emulator, and by the host function, against the oracle; and the advance of lengths."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.arch import CTA_RESERVED, GPUS, Target
from tests.unit.lower_cuda.emulate import library
from tests.unit.lower_cuda.emulate_plan import Planner
from tests.unit.lower_cuda.plan_checks import OfAnyPlanner, random_plans_agree


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Planner:
    return Planner.emulated(tmp_path_factory.mktemp("plan"))


class TestInTheEmulator(OfAnyPlanner):
    def test_any_plan_is_the_oracles(self, planner: Planner) -> None:
        random_plans_agree(planner, 60)


def test_divisors_divide(planner: Planner) -> None:
    """Dividends of an int, the largest and those about the multiples of the divisor among them."""
    most = 2**31 - 1

    @settings(max_examples=500)
    @given(st.one_of(st.integers(1, 5000), st.integers(1, most)), st.data())
    def check(divisor: int, data: st.DataObject) -> None:
        times = data.draw(st.integers(0, most // divisor))
        for dividend in (times * divisor - 1, times * divisor, data.draw(st.integers(0, most)), most):
            if dividend >= 0:
                assert planner.divided(dividend, divisor) == divmod(dividend, divisor)

    check()


SPLITS = """
extern "C" int cheapest(int heads, int resident, int ctas_per_sm, int tile_bytes, int wave_bytes, int tiles, int limit) {
  return kvgen::SplitModel{heads, resident, ctas_per_sm, tile_bytes, wave_bytes}.cheapest(tiles, limit);
}
extern "C" int most(int heads, int resident, int limit) { return kvgen::SplitModel{heads, resident, 1, 1}.most(limit); }
extern "C" int of_one_in(int all, int reserved, int ctas, int bytes) { return kvgen::SharedMemory{all, reserved}.of_one_in(ctas, bytes); }
"""
SMS, TILE, WAVE_BYTES = 132, 16896, 160 * 1024


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The host's model of time and of shared memory."""
    return ctypes.CDLL(str(library(f'#include "kvgen/host/launch.cuh"\n{SPLITS}', tmp_path_factory.mktemp("splits"))))


@given(heads=st.integers(1, 5000), tiles=st.integers(0, 9000), ctas=st.sampled_from([1, 2, 4]), limit=st.sampled_from([8, 256]))
@settings(max_examples=200)
def test_splits_have_a_tile_each_and_a_slot_in_the_workspace(host: ctypes.CDLL, heads: int, tiles: int, ctas: int, limit: int) -> None:
    splits = host.cheapest(heads, SMS * ctas, ctas, TILE, WAVE_BYTES, tiles, limit)
    assert 1 <= splits <= min(host.most(heads, SMS * ctas, limit), max(1, tiles))


@pytest.mark.parametrize("target", list(GPUS))
@pytest.mark.parametrize("ctas", [1, 2, 4])
def test_shared_memory_holds_as_many_ctas_as_the_schedule_says(host: ctypes.CDLL, target: Target, ctas: int) -> None:
    gpu = GPUS[target]
    for needed in (0, 20_000, (gpu.shared_per_sm // ctas - CTA_RESERVED) // 128 * 128):
        given = host.of_one_in(gpu.shared_per_sm, CTA_RESERVED, ctas, needed)
        assert needed <= given <= gpu.shared_per_cta
        assert gpu.shared_per_sm // (given + CTA_RESERVED) == ctas
