"""The packer and unpacker alone, over formats that no shipped variant has: they compile, and nothing spills. Each architecture compiles a
third of the formats, with KVGEN_COVERING=whole all of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvgen._resources import templates
from kvgen.arch import GPUS
from kvgen.lower.backend import Source
from kvgen.lower.template import reached_headers
from kvgen.toolchain import build
from kvgen.toolchain.cache import ArtifactCache

pytestmark = pytest.mark.nvcc

FORMATS = (
    "__half, Quant<4, Axis::channel, 128, true>, Quant<4, Axis::token, 128, true>, 128, 128",
    "__half, Quant<2, Axis::channel, 128, true>, Quant<2, Axis::token, 128, true>, 128, 128",
    "__half, Quant<2, Axis::channel, 128, true>, Quant<4, Axis::token, 128, true>, 128, 128",
    "__half, Quant<8, Axis::channel, 128, true>, Quant<8, Axis::token, 128, true>, 128, 128",
    "__half, Quant<8, Axis::channel, 32, false>, Quant<2, Axis::token, 32, true>, 96, 64",
    "__half, Quant<8, Axis::channel, 128, false>, Quant<8, Axis::channel, 128, false>, 128, 128",
    "__half, Quant<2, Axis::channel, 16, true>, Quant<2, Axis::channel, 16, true>, 128, 128",
    "__nv_bfloat16, Quant<2, Axis::channel, 128, true>, Quant<2, Axis::token, 128, false>, 128, 128",
    "__nv_bfloat16, Quant<4, Axis::token, 32, false>, Quant<8, Axis::token, 64, true>, 64, 16",
    "__half, Quant<2, Axis::token, 256, true>, Quant<4, Axis::token, 64, true>, 256, 256",
    "__half, Quant<4, Axis::channel, 32, true>, Quant<16, Axis::token, 256, false>, 256, 256",
    "__half, Quant<4, Axis::channel, 32, true>, Quant<2, Axis::token, 16, true>, 48, 64",
    "__nv_bfloat16, Quant<16, Axis::token, 128, false>, Quant<8, Axis::token, 128, true>, 128, 32",
)


FINE, FEW = re.compile(r"unpack_kernel<.*Quant<2, \(Axis\)0, 16,"), 16
"""Unpacking 2-bit codes in groups of 16 tokens holds the scales of two groups for every tile; SM89 spills so many bytes of them."""


def source(target: str, formats: Sequence[str]) -> Source:
    """Both launch functions of every format."""
    lines = ['#include "kvgen/pack/pack.cuh"', '#include "kvgen/pack/unpack.cuh"', "using namespace kvgen;"]
    for index, arguments in enumerate(formats):
        lines.append(f"using F{index} = Format<{arguments}>;")
        lines += [
            f"template cudaError_t kvgen::launch_pack<F{index}, {paged}>(const PackArgs&, cudaStream_t);" for paged in ("false", "true")
        ]
        lines.append(f"template cudaError_t kvgen::launch_unpack<F{index}, true>(const UnpackArgs&, cudaStream_t);")
    text = "\n".join(lines) + "\n"
    include = tuple(templates() / part / "include" for part in ("cuda", "common"))
    return Source(text, "cuda", target, include, headers=reached_headers(text, include))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", GPUS)
def test_packing_kernels_compile_without_spills(target: str, tmp_path: Path) -> None:
    whole = os.environ.get("KVGEN_COVERING") == "whole"
    formats = FORMATS if whole else FORMATS[list(GPUS).index(target) :: len(GPUS)]
    resources = build(source(target, formats), ArtifactCache(tmp_path)).resources
    assert sum("pack_kernel" in name for name in resources.kernels) == 3 * len(formats)
    assert {name: k.spill_bytes for name, k in resources.kernels.items() if k.spill_bytes > (FEW if FINE.match(name) else 0)} == {}
