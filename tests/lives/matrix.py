"""Random operations on matrices, on the CPU and by the emulated CUDA kernels, to the bit.

    python -m tests.lives.matrix --count 2000 [--seed 0] [--only N]

Each number is a compiled schedule of either back end with some lives; a life is a matrix of any shape and place in memory, and calls in
any order. A failure is printed with its number. Exit code 1 where one failed.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Protocol

import torch

from kvgen.runtime.matrix import MatrixVariant, load_matrix
from kvgen.toolchain import build
from kvgen.verify import matrix as reference
from kvgen.verify.matrix import same_bits
from kvgen.verify.quantize import torch_dtype
from tests.lives.command import failures, live, parser
from tests.lives.drawn import CPU, generator
from tests.lives.drawn_matrix import (
    KINDS,
    Placed,
    drawn_matrix,
    drawn_matrix_schedule,
    drawn_matrix_spec,
    drawn_place,
    drawn_rows,
    drawn_scales,
    drawn_shape,
)  # fmt: skip
from tests.unit.lower_cuda.emulate_matrix import EmulatedMatrix

LIVES, CALLS = 12, 4
MOST_ELEMENTS, MOST_THREADS = 60_000, 2_000
"""Of a call on the CPU; in the emulator, which runs threads one after the other."""


class Operations(Protocol):
    """The functions of a module."""

    def scales(self, x: torch.Tensor, out: torch.Tensor) -> object:
        """Write the scales."""

    def quantize(self, x: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> object:
        """Write the codes by these scales."""

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> object:
        """Write what is read back."""


class OnCpu:
    """A module of the CPU back end, with as many threads as each call draws."""

    def __init__(self, variant: MatrixVariant, draw: Random) -> None:
        self.variant, self.draw = variant, draw

    def scales(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See Operations."""
        self._variant().scales(x, out)

    def quantize(self, x: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
        """See Operations."""
        self._variant().quantize(x, scales, codes)

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """See Operations."""
        self._variant().dequantize(codes, scales, out)

    def _variant(self) -> MatrixVariant:
        assert self.variant.module.set_threads is not None
        self.variant.module.set_threads(min(self.draw.choice([1, 2, 3, 7]), len(os.sched_getaffinity(0))))
        return self.variant


class InEmulator:
    """Emulated CUDA kernels: CTAs in either order, on as many multiprocessors as each call draws."""

    def __init__(self, kernels: EmulatedMatrix, draw: Random) -> None:
        self.kernels, self.draw = kernels, draw

    def scales(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See Operations."""
        self._run(0, x, out, torch.empty(x.shape, dtype=torch.int8))

    def quantize(self, x: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
        """See Operations."""
        self._run(1, x, scales, codes)

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """See Operations."""
        self._run(2, out, scales, codes)

    def _run(self, function: int, x: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
        self.kernels.run(function, x, scales, codes, self.draw.random() < 0.5, self.draw.choice([1, 3, 132]))


class MatrixLife:
    """A matrix, and calls on it in any order. Raises CheckError at the first difference."""

    def __init__(self, operations: Operations, dtype: torch.dtype, size: tuple[int, int], draw: Random) -> None:
        self.operations, self.dtype, self.draw = operations, dtype, draw
        kind, self.shape = draw.choice(KINDS), drawn_shape(draw, *size)
        self.x = drawn_rows(draw, drawn_matrix(draw, kind, *self.shape, dtype))
        self.calls = [f"{kind}, {'x'.join(map(str, self.shape))}, rows every {self.x.view.stride(0)} elements"]

    def live(self) -> None:
        """Some calls, each twice."""
        for call in self.draw.choices([self.scales, self.quantize, self.dequantize], k=CALLS):
            self.calls.append(call.__name__)
            call()

    def scales(self) -> None:
        """Of the matrix."""
        x = self.x.view
        self._agrees((x.shape[1],), reference.scales(x), [self.x], lambda out: self.operations.scales(x, out))

    def quantize(self) -> None:
        """By its own scales or by others."""
        x, scales = self.x.view, self._given(drawn_scales(self.draw, self.x.view))
        codes = reference.codes(x, scales.view)
        self._agrees(self.shape, codes, [self.x, scales], lambda out: self.operations.quantize(x, scales.view, out))

    def dequantize(self) -> None:
        """Any codes."""
        scales = self._given(drawn_scales(self.draw, self.x.view))
        codes = drawn_rows(self.draw, torch.randint(-127, 128, self.shape, generator=generator(self.draw)).to(torch.int8))
        back = reference.dequantized(codes.view, scales.view, self.dtype)
        self._agrees(self.shape, back, [codes, scales], lambda out: self.operations.dequantize(codes.view, scales.view, out))

    def _given(self, scales: torch.Tensor) -> Placed:
        placed = drawn_place(self.draw, tuple(scales.shape), scales.dtype)
        placed.view.copy_(scales)
        return placed

    def _agrees(self, shape: tuple[int, ...], want: torch.Tensor, read: list[Placed], call: Callable[[torch.Tensor], None]) -> None:
        """Two calls write what is wanted, and nothing else: neither around it nor what they read."""
        before = [placed.memory.clone() for placed in read]
        for _ in range(2):
            out = drawn_place(self.draw, shape, want.dtype)
            expected = out.memory.clone()
            expected.as_strided(shape, out.view.stride(), out.view.storage_offset()).copy_(want)
            call(out.view)
            same_bits(self.calls[-1], "element", out.view, want)
            same_bits(self.calls[-1], "element of the memory around", out.memory, expected)
        for placed, kept in zip(read, before, strict=True):
            same_bits(self.calls[-1], "element that is read", placed.memory, kept)


def compiled(seed: int, folder: Path) -> tuple[Callable[[Random], MatrixLife], str]:
    """What makes lives of a number's schedule, and what it is."""
    draw = Random(seed)
    spec, target = drawn_matrix_spec(draw)
    schedule = drawn_matrix_schedule(draw, spec, target)
    dtype, named = torch_dtype(spec.matrix.dtype), f"{spec.format()}\n{schedule}"
    if target == "cpu":
        variant = load_matrix(spec, build(CPU.lower(spec, schedule, target)).path)
        return lambda draw: MatrixLife(OnCpu(variant, draw), dtype, (MOST_ELEMENTS, 1), draw), named
    kernels, launch = EmulatedMatrix(dtype, schedule.launch, folder), schedule.launch
    size = (MOST_THREADS * max(2, launch.integer("rows")), launch.integer("channel_threads"))
    return lambda draw: MatrixLife(InEmulator(kernels, draw), dtype, size, draw), named


def lives(seed: int, count: int = LIVES) -> list[str]:
    """What failed of the lives of a number."""
    with tempfile.TemporaryDirectory(prefix="lives-") as folder:
        made, named = compiled(seed, Path(folder))
        return failures(seed, count, named, made)


def main(argv: Sequence[str] | None = None) -> int:
    """Live; the exit code."""
    return live(parser("matrix", __doc__, 2000).parse_args(argv), LIVES, lives)


if __name__ == "__main__":
    sys.exit(main())
