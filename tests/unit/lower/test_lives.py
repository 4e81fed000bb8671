"""A few random lives of the long checks `python -m tests.lives.cpu`, `emulated`, `gpu`, `tilelang`, `matrix`."""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random

import pytest
import torch

from kvgen.runtime.variant import Variant
from kvgen.verify import matrix as reference
from tests.lives import cpu, emulated, gpu, matrix, tilelang
from tests.lives.cases import LifeCase, drawn_cpu_case
from tests.support.tilelang import needs_tilelang


@pytest.mark.parametrize("number", [1, 10])
def test_lives_on_the_cpu_are_those_of_the_reference(number: int) -> None:
    assert cpu.lives(number, 3) == []


@pytest.mark.slow
def test_an_emulated_life_is_that_of_the_reference() -> None:
    assert emulated.lives(4, 2) == []


@pytest.mark.parametrize("number", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_lives_of_a_matrix_are_those_of_the_reference(number: int) -> None:
    """On the CPU, and in the emulator."""
    assert matrix.lives(number, 2) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_life_of_a_tilelang_program_is_that_of_the_reference() -> None:
    needs_tilelang()
    assert tilelang.lives(32, 1) == []


class Off:
    """Operations on a matrix of which one result is wrong."""

    def __init__(self, wrong: str) -> None:
        self.wrong = wrong

    def scales(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(reference.scales(x[:-1] if self.wrong == "last row" else x))

    def quantize(self, x: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
        codes.copy_(reference.codes(x, scales))
        if self.wrong == "one code beyond" and codes.numel():
            codes.as_strided((1,), (1,), codes[-1:, -1:].storage_offset() + 1).fill_(1)

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        exact = reference.dequantized(codes, scales, out.dtype)
        out.copy_(codes.to(out.dtype) * scales.to(out.dtype) if self.wrong == "16 bits" else exact)


@pytest.mark.parametrize("wrong", ["", "last row", "one code beyond", "16 bits"])
def test_lives_of_a_matrix_find_what_is_wrong(wrong: str) -> None:
    found = matrix.failures(0, 40, "named", lambda draw: matrix.MatrixLife(Off(wrong), torch.float16, (3000, 1), draw))
    assert bool(found) == bool(wrong)


class OtherCap(LifeCase):
    """A module that is told to be of another soft cap than it is."""

    def compiled(self) -> Variant:
        told = replace(self.spec, attention=replace(self.spec.attention, softcap=0.01))
        return Variant(told, self.layout, super().compiled().module)


def test_a_wrong_module_is_found() -> None:
    case = drawn_cpu_case(Random(0))
    lives = gpu.Lives(OtherCap(case.spec, case.schedule, case.target), 0, 0, range(3), time.time() + 600)
    found = [given for given in lives.run() if isinstance(given, gpu.Lived)]
    assert len(found) == 3
    assert any(lived.failure and "output" in lived.failure for lived in found)
