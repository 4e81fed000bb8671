"""Specs of the operations on a matrix: quantize [tokens, channels] to 8 bits with a scale per channel, and read it back.

These are the stand-alone kernels of the INT8 per-channel paper. How a cache is quantized is part of a KernelSpec.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from kvgen.arch import Arch
from kvgen.digest import digest
from kvgen.spec.base import Limits, Model, Step
from kvgen.spec.model import MAX_KV_LEN, MAX_WORKLOADS, UNSIGNED_ZERO, DType, integer, not_too_many
from kvgen.spec.rules import Problem

MAX_CHANNELS = 1 << 20

Operation = Literal["quantize", "dequantize"]


class MatrixFormat(Model):
    """A matrix and its codes: q = round(x / scale) with scale = max |x| / 127 of the channel (docs/matrix.md)."""

    dtype: DType = "float32"
    """Type of the matrix; scales are float32."""
    bits: Annotated[Literal[8], Step("before", integer)] = 8
    """Bits per code."""
    axis: Literal["channel"] = "channel"
    """channel: one scale per channel, over all tokens."""


class MatrixShape(Model):
    """A shape of matrices to tune for."""

    tokens: Annotated[int, Limits(gt=0, le=MAX_KV_LEN)]
    """Rows."""
    channels: Annotated[int, Limits(gt=0, le=MAX_CHANNELS)]
    """Columns."""
    weight: Annotated[float, Limits(ge=1e-6, le=1e6), UNSIGNED_ZERO] = 1.0
    """Weight in the geometric mean of times that a winner is judged by."""

    @property
    def key(self) -> str:
        """Short name: tokens x channels."""
        return f"{self.tokens}x{self.channels}"

    @property
    def elements(self) -> int:
        """Elements of the matrix."""
        return self.tokens * self.channels


class MatrixSpec(Model):
    """An operation on a matrix, its format, and the shapes that matter."""

    name: Annotated[str, Limits(min_length=1, max_length=80, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "matrix"
    """Letters, digits, dots, dashes and underscores."""
    operation: Operation
    """The call that is timed: quantize (codes by given scales) or dequantize. Every kernel has both, and computes scales."""
    arch: Arch = "native"
    """Target; native is the first visible GPU, or the CPU."""
    matrix: MatrixFormat = MatrixFormat.trusted()
    """Type and codes."""
    workloads: Annotated[
        tuple[MatrixShape, ...], Limits(min_length=1, max_length=MAX_WORKLOADS, strict=False), Step("before", not_too_many)
    ] = (MatrixShape.trusted(tokens=131072, channels=1024),)
    """Shapes to tune for."""

    def format(self) -> dict[str, Any]:
        """The part of a spec that decides the result and what is timed: without name, arch and workloads."""
        return {name: value for name, value in self.to_json().items() if name in ("operation", "matrix")}

    @property
    def format_id(self) -> str:
        """Digest of `format()`."""
        return digest(self.format())

    def problems(self) -> Iterable[Problem]:
        """Shapes that are listed twice."""
        return listed_twice(enumerate(self.workloads))


def listed_twice(shapes: Iterable[tuple[int, MatrixShape]]) -> Iterator[Problem]:
    """Shapes, given with their places in the list, that stand there a second time."""
    seen: dict[str, int] = {}
    for index, shape in shapes:
        if shape.key in seen:
            yield ("workloads", index), f"{shape.key} is listed twice, first as workloads[{seen[shape.key]}]"
        seen.setdefault(shape.key, index)
