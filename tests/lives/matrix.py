"""Random operations on matrices, on the CPU and by the emulated CUDA kernels, to the bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch

from kvgen.runtime.matrix import load_matrix
from kvgen.toolchain import build
from kvgen.verify import matrix as reference
from kvgen.verify.matrix import same_bits
from kvgen.verify.quantize import torch_dtype
from tests.lives.draw import (
    CPU,
    CUDA,
    MATRIX_KINDS,
    Placed,
    drawn_matrix,
    drawn_matrix_spec,
    drawn_place,
    drawn_rows,
    drawn_scales,
    drawn_schedule,
    drawn_shape,
    generator,
)
from tests.unit.lower_cuda.emulate_matrix import EmulatedMatrix

CALLS = 4
MOST_ELEMENTS, MOST_THREADS = 60_000, 2_000
"""Of a call on the CPU; in the emulator, which runs threads one after the other."""

Operation = Callable[..., object]
"""A call by its name: `scales` (x, out), `quantize` (x, scales, codes) or `dequantize` (codes, scales, out)."""


def matrix(number: int, folder: Path) -> tuple[str, Callable[[Random], MatrixLife]]:
    """A number's schedule of either back end. Each call draws threads; in the emulator, multiprocessors and the order of CTAs."""
    draw = Random(number)
    spec, target = drawn_matrix_spec(draw)
    backend = CPU if target == "cpu" else CUDA
    schedule = drawn_schedule(draw, backend, spec, target)
    dtype, launch = torch_dtype(spec.matrix.dtype), schedule.launch

    def on_cpu(draw: Random) -> MatrixLife:
        variant = load_matrix(spec, build(backend.lower(spec, schedule, target)).path)

        def call(name: str, *tensors: torch.Tensor) -> None:
            assert variant.module.set_threads is not None
            variant.module.set_threads(min(draw.choice([1, 2, 3, 7]), len(os.sched_getaffinity(0))))
            getattr(variant, name)(*tensors)

        return MatrixLife(call, dtype, (MOST_ELEMENTS, 1), draw)

    def in_emulator(draw: Random) -> MatrixLife:
        def call(name: str, *tensors: torch.Tensor) -> None:
            x, scales, codes = {
                "scales": lambda x, out: (x, out, torch.empty(x.shape, dtype=torch.int8)),
                "quantize": lambda x, scales, codes: (x, scales, codes),
                "dequantize": lambda codes, scales, out: (out, scales, codes),
            }[name](*tensors)
            function = ("scales", "quantize", "dequantize").index(name)
            kernels.run(function, x, scales, codes, draw.random() < 0.5, draw.choice([1, 3, 132]))

        size = (MOST_THREADS * max(2, launch.integer("rows")), launch.integer("channel_threads"))
        return MatrixLife(call, dtype, size, draw)

    if target != "cpu":
        kernels = EmulatedMatrix(dtype, launch, folder)
    return f"{spec.format()}\n{schedule}", on_cpu if target == "cpu" else in_emulator


class MatrixLife:
    """A matrix, and calls on it in any order. Raises CheckError at the first difference."""

    def __init__(self, call: Operation, dtype: torch.dtype, size: tuple[int, int], draw: Random) -> None:
        self.call, self.dtype, self.draw = call, dtype, draw
        kind, self.shape = draw.choice(MATRIX_KINDS), drawn_shape(draw, *size)
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
        self._agrees((x.shape[1],), reference.scales(x), [self.x], lambda out: self.call("scales", x, out))

    def quantize(self) -> None:
        """By its own scales or by others."""
        x, scales = self.x.view, self._given(drawn_scales(self.draw, self.x.view))
        codes = reference.codes(x, scales.view)
        self._agrees(self.shape, codes, [self.x, scales], lambda out: self.call("quantize", x, scales.view, out))

    def dequantize(self) -> None:
        """Any codes."""
        scales = self._given(drawn_scales(self.draw, self.x.view))
        codes = drawn_rows(self.draw, torch.randint(-127, 128, self.shape, generator=generator(self.draw)).to(torch.int8))
        back = reference.dequantized(codes.view, scales.view, self.dtype)
        self._agrees(self.shape, back, [codes, scales], lambda out: self.call("dequantize", codes.view, scales.view, out))

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
