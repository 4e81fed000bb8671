"""Operations on a matrix on the GPU: the paper's four kernels, the defaults, and wide vectors."""

from __future__ import annotations

import pytest
import torch

from kvgen.arch import target_of
from kvgen.lower.backend import get_backend
from kvgen.lower.matrix import NO_LAYOUT, PAPER_VARIANTS
from kvgen.lower.schedule import Params, Schedule
from kvgen.measure.inputs import MatrixInputs
from kvgen.runtime.matrix import MatrixVariant, load_matrix
from kvgen.spec import MatrixShape
from kvgen.toolchain import build
from kvgen.verify import CheckPolicy
from kvgen.verify.matrix import MatrixCheck, MatrixWorkloadCheck
from tests.support.cpu import matrix_spec

LAUNCHES = {
    **PAPER_VARIANTS,
    "refined": Params({**PAPER_VARIANTS["vectorized"], "rows": 4, "quotient": "refine", "cache": "streaming"}),
    "wide": Params({**PAPER_VARIANTS["tiled"], "vector": 16, "rows": 2, "quotient": "refine"}),
}


def compiled(dtype: str, launch: Params) -> MatrixVariant:
    target = target_of(torch.cuda.get_device_capability())
    spec = matrix_spec("dequantize", dtype, target)
    return load_matrix(spec, build(get_backend("cuda").lower(spec, Schedule("cuda", NO_LAYOUT, launch), target)).path)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", LAUNCHES)
def test_kernels_are_right_to_the_bit(name: str, dtype: str) -> None:
    variant = compiled(dtype, LAUNCHES[name])
    check = MatrixCheck(variant, "cuda", CheckPolicy())
    check.run()
    inputs = MatrixInputs(variant, MatrixShape(tokens=16384, channels=1000), "cuda", cold=0)
    MatrixWorkloadCheck(variant, "16384x1000", inputs.matrices[0], inputs.codes[0], inputs.outs[0]).run()
    check.again()
