"""Lowering of the operations on a matrix, for GPUs and for the CPU. Their kernels are over a row-major matrix, and there is nothing to
choose about its codes, so the layout part of a schedule is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvgen._resources import templates
from kvgen.arch import GPUS, Target
from kvgen.lower.backend import CPU_FLAGS, MATRIX_FUNCTIONS, Language, Lowering, Source
from kvgen.lower.gpu import wrong_target
from kvgen.lower.schedule import Params, Schedule
from kvgen.lower.space import SearchSpace
from kvgen.lower.template import reached_headers, render
from kvgen.spec import MatrixSpec

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
NO_LAYOUT = Params()

PAPER_VARIANTS: Mapping[str, Params] = {
    "naive": Params(channel_threads=32, row_threads=8, vector=1, rows=1, scales="global", cache="default", quotient="divide"),
    "tiled": Params(channel_threads=32, row_threads=8, vector=1, rows=1, scales="shared", cache="default", quotient="divide"),
    "coarsened": Params(channel_threads=256, row_threads=1, vector=1, rows=16, scales="global", cache="default", quotient="divide"),
    "vectorized": Params(channel_threads=32, row_threads=8, vector=4, rows=1, scales="global", cache="default", quotient="divide"),
}
"""The four variants of the INT8 per-channel paper as launches of the CUDA back end. The paper does not give its block sizes."""


@dataclass(frozen=True)
class MatrixLowering(Lowering[MatrixSpec]):
    """The kernels of one back end: one template, which lies with its headers in the folder of its name."""

    name: str
    targets: tuple[Target, ...]
    template: str
    language: Language
    elements: Mapping[str, str]
    """C++ types of elements by dtype."""
    plain: Callable[[MatrixSpec], Params]
    """The launch of the default."""
    flags: tuple[str, ...] = ()

    def unsupported(self, spec: MatrixSpec, target: Target) -> str | None:
        del spec
        return wrong_target(self.targets, target)

    def space(self, spec: MatrixSpec, target: Target) -> SearchSpace:
        """`search_spaces/<name>-matrix.yaml`. Raises UnsupportedError."""
        self.require(spec, target)
        dtype = spec.matrix.dtype
        facts = {"operation": spec.operation, "dtype": dtype, "element_bytes": ELEMENT_BYTES[dtype], "target": target}
        return SearchSpace.load(f"{self.name}-matrix", facts, spec.workloads)

    def defaults(self, spec: MatrixSpec, target: Target) -> tuple[Schedule, ...]:
        """A safe schedule of the space, for all workloads. Raises UnsupportedError."""
        self.require(spec, target)
        return (Schedule(self.name, NO_LAYOUT, self.plain(spec)),)

    def tiling(self, spec: MatrixSpec, schedule: Schedule, target: Target) -> None:
        """None: all its tiles are alike, and each is one CTA's."""
        del spec, schedule, target

    def lower(self, spec: MatrixSpec, schedule: Schedule, target: Target) -> Source:
        """Source of one variant. Raises UnsupportedError where spec or schedule cannot be built."""
        self.require_schedule(spec, schedule, target)
        dtype = spec.matrix.dtype
        names = {"dtype": dtype, "element": self.elements[dtype], "type": "k" + dtype.capitalize()}
        text = render(self.template, launch=dict(schedule.launch), **names)
        include = tuple(templates() / part / "include" for part in (self.name, "common"))
        return Source(text, self.language, target, include, self.flags, reached_headers(text, include), MATRIX_FUNCTIONS)


def _on_gpus(spec: MatrixSpec) -> Params:
    """16-byte loads, four rows of a thread in flight."""
    launch = Params(channel_threads=32, row_threads=8, vector=16 // ELEMENT_BYTES[spec.matrix.dtype], rows=4)
    quotient = "refine" if spec.operation == "quantize" else "divide"  # dequantize divides nothing
    return Params(launch, scales="global", cache="default", quotient=quotient)


CUDA = MatrixLowering(
    "cuda",
    tuple(GPUS),
    "cuda/matrix.cu.jinja",
    "cuda",
    {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"},
    _on_gpus,
)
"""Element-wise kernels by given scales, and a reduction over tokens for the scales. The INT8 paper's four variants are schedules."""
CPU = MatrixLowering(
    "cpu",
    ("cpu",),
    "cpu/matrix.cpp.jinja",
    "c++",
    {"float32": "float", "float16": "kvgen::Half", "bfloat16": "kvgen::Bfloat"},
    lambda _: Params(rows=64, channels_per_tile=2048),  # whatever the shape
    CPU_FLAGS,
)
"""Tiles of rows and channels over OpenMP threads; the compiler vectorizes the loops."""
