"""The CUDA kernels of operations on a matrix: run by the emulator, and compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from kvgen.lower.backend import get_backend
from kvgen.lower.matrix import NO_LAYOUT, PAPER_VARIANTS
from kvgen.lower.schedule import Params, Schedule
from kvgen.toolchain import build
from kvgen.verify import matrix as reference
from tests.support.cpu import matrix_spec
from tests.unit.lower_cuda.emulate_matrix import EmulatedMatrix

SHAPES = ((1, 1), (5, 128), (33, 65), (37, 96), (70, 200))
NARROW = {"channel_threads": 32, "row_threads": 2}
SCHEDULES = {
    "naive": (torch.float16, Params({**PAPER_VARIANTS["naive"], **NARROW})),
    "tiled and vectorized": (torch.bfloat16, Params({**PAPER_VARIANTS["tiled"], **NARROW, "vector": 4, "rows": 2})),
    "all at once": (
        torch.float32,
        Params({**PAPER_VARIANTS["coarsened"], **NARROW, "vector": 4, "cache": "streaming", "quotient": "refine"}),
    ),
}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], EmulatedMatrix]:
    """The schedule of a name, compiled once."""
    return cache(lambda name: EmulatedMatrix(*SCHEDULES[name], tmp_path_factory.mktemp("emulated")))


@pytest.mark.parametrize("name", SCHEDULES)
def test_emulated_kernels_are_right_to_the_bit(name: str, emulated: Callable[[str], EmulatedMatrix]) -> None:
    dtype, kernels = SCHEDULES[name][0], emulated(name)
    for number, (tokens, channels) in enumerate(SHAPES):
        x = (reference.uniform(tokens, channels, torch.float32, "cpu") * torch.logspace(-4, 3, channels)).to(dtype)
        x[:, channels // 2] = 0
        scale = torch.full((channels,), torch.nan)
        kernels.run(0, x, scale, torch.empty(x.shape, dtype=torch.int8), backwards=bool(number % 2))
        assert torch.equal(scale, reference.scales(x))
        for given in (scale, scale / 3):
            codes = torch.full(x.shape, -128, dtype=torch.int8)
            kernels.run(1, x, given, codes, backwards=bool(number % 2))
            assert torch.equal(codes, reference.codes(x, given))
        back = torch.full_like(x, torch.nan)
        kernels.run(2, back, scale, codes)
        assert torch.equal(back, reference.dequantized(codes, scale, dtype))


def test_refined_quotients_are_those_of_a_division(emulated: Callable[[str], EmulatedMatrix]) -> None:
    """Numbers next to rounding ties, for scales of many exponents and mantissas, and scales that are too small or large to refine by."""
    kernels = emulated("all at once")
    generator = torch.Generator().manual_seed(0)
    mantissas = torch.rand(96, generator=generator) + 1
    scale = mantissas * torch.exp2(torch.randint(-40, 40, (96,), generator=generator).float())
    scale[:4] = torch.tensor([1e-40, 3e-33, 1.9e32, 0.0])
    ties = (torch.arange(-128, 128).float() + 0.5).unsqueeze(1) * scale
    steps = [ties]
    for toward in (-torch.inf, torch.inf):
        near = ties
        for _ in range(2):
            near = torch.nextafter(near, torch.tensor(toward))
            steps.append(near)
    x = torch.cat([*steps, torch.full((1, 96), 3e38)]).contiguous()
    codes = torch.full(x.shape, -128, dtype=torch.int8)
    kernels.run(1, x, scale, codes)
    assert torch.equal(codes, reference.codes(x, scale))


@pytest.mark.nvcc
@pytest.mark.parametrize("target", ["sm80", "sm90"])
def test_the_default_compiles_without_spills(target: str) -> None:
    spec, backend = matrix_spec(arch=target), get_backend("cuda")
    launch = Params({**PAPER_VARIANTS["coarsened"], "channel_threads": 64, "row_threads": 4, "vector": 4})  # the most registers
    schedule = backend.default(spec, "sm90") if target == "sm90" else Schedule("cuda", NO_LAYOUT, launch)
    resources = build(backend.lower(spec, schedule, target)).resources  # type: ignore[arg-type]
    assert resources.spill_bytes == 0
    assert all(kernel.registers <= 128 for kernel in resources.kernels.values())
