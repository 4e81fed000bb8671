"""Operations on a matrix for the CPU: tiles of rows and channels over OpenMP threads."""

from __future__ import annotations

from typing import ClassVar

from kvgen.arch import Target
from kvgen.lower import flags
from kvgen.lower.matrix import MatrixLowering
from kvgen.lower.schedule import Params
from kvgen.spec import MatrixSpec


class CpuMatrix(MatrixLowering):
    """Loops that the compiler vectorizes."""

    name = "cpu"
    targets: tuple[Target, ...] = ("cpu",)
    template = "cpu/matrix.cpp.jinja"
    language = "c++"
    folder = "cpu"
    flags = flags.CPU
    elements: ClassVar[dict[str, str]] = {"float32": "float", "float16": "kvgen::Half", "bfloat16": "kvgen::Bfloat"}

    def plain_launch(self, spec: MatrixSpec) -> Params:
        """64 rows of at most 2048 channels, whatever the shape."""
        del spec
        return Params(rows=64, channels_per_tile=2048)
