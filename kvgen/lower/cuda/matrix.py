"""Operations on a matrix for GPUs: one template, of which the INT8 paper's four variants are schedules."""

from __future__ import annotations

from typing import ClassVar

from kvgen.arch import GPUS, Target
from kvgen.lower.matrix import ELEMENT_BYTES, MatrixLowering
from kvgen.lower.schedule import Params
from kvgen.spec import MatrixSpec


class CudaMatrix(MatrixLowering):
    """Element-wise kernels by given scales, and a reduction over tokens for the scales."""

    name = "cuda"
    targets: tuple[Target, ...] = tuple(GPUS)
    template = "cuda/matrix.cu.jinja"
    language = "cuda"
    folder = "cuda"
    elements: ClassVar[dict[str, str]] = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}

    def plain_launch(self, spec: MatrixSpec) -> Params:
        """16-byte loads, four rows of a thread in flight."""
        vector = 16 // ELEMENT_BYTES[spec.matrix.dtype]
        launch = Params(channel_threads=32, row_threads=8, vector=vector, rows=4)
        quotient = "refine" if spec.operation == "quantize" else "divide"  # dequantize divides nothing
        return Params({**launch, "scales": "global", "cache": "default", "quotient": quotient})
