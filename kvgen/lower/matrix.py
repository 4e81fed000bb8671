"""Lowering of the operations on a row-major matrix, for GPUs and for the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvgen.arch import GPUS, Target
from kvgen.lower.operation import CPU_ELEMENTS, NO_LAYOUT, OperationLowering
from kvgen.lower.schedule import Params, Schedule
from kvgen.lower.space import Fact
from kvgen.spec import MatrixSpec

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

PAPER_VARIANTS: Mapping[str, Params] = {
    "naive": Params(channel_threads=32, row_threads=8, vector=1, rows=1, scales="global", cache="default", quotient="divide"),
    "tiled": Params(channel_threads=32, row_threads=8, vector=1, rows=1, scales="shared", cache="default", quotient="divide"),
    "coarsened": Params(channel_threads=256, row_threads=1, vector=1, rows=16, scales="global", cache="default", quotient="divide"),
    "vectorized": Params(channel_threads=32, row_threads=8, vector=4, rows=1, scales="global", cache="default", quotient="divide"),
}
"""The four variants of the INT8 per-channel paper as launches of the CUDA back end. The paper does not give its block sizes."""


@dataclass(frozen=True)
class MatrixLowering(OperationLowering[MatrixSpec]):
    """Of a back end."""

    operation = "matrix"
    functions = ("dequantize", "quantize", "scales")

    plain: Callable[[MatrixSpec], Params]
    """The launch of the default."""

    def facts(self, spec: MatrixSpec, target: Target) -> Mapping[str, Fact]:
        del target
        return {"operation": spec.operation, "dtype": spec.matrix.dtype, "element_bytes": ELEMENT_BYTES[spec.matrix.dtype]}

    def context(self, spec: MatrixSpec, target: Target) -> Mapping[str, Any]:
        del target
        return {"dtype": spec.matrix.dtype}

    def defaults(self, spec: MatrixSpec, target: Target) -> tuple[Schedule, ...]:
        """A safe schedule of the space, for all workloads. Raises UnsupportedError."""
        self.require(spec, target)
        return (Schedule(self.name, NO_LAYOUT, self.plain(spec)),)


def _on_gpus(spec: MatrixSpec) -> Params:
    """16-byte loads, four rows of a thread in flight."""
    launch = Params(channel_threads=32, row_threads=8, vector=16 // ELEMENT_BYTES[spec.matrix.dtype], rows=4)
    quotient = "refine" if spec.operation == "quantize" else "divide"  # dequantize divides nothing
    return Params(launch, scales="global", cache="default", quotient=quotient)


CUDA = MatrixLowering("cuda", tuple(GPUS), {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}, _on_gpus)
"""Element-wise kernels by given scales, and a reduction over tokens for the scales. The INT8 paper's four variants are schedules."""
CPU = MatrixLowering("cpu", ("cpu",), CPU_ELEMENTS, lambda _: Params(rows=64, channels_per_tile=2048))
"""Tiles of rows and channels over OpenMP threads; the compiler vectorizes the loops."""
