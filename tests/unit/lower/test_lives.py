"""A few random lives of the long check `python -m tests.lives`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch

from kvgen.runtime.calls import Variant
from kvgen.verify import matrix as reference
from tests.lives.emulated import emulated
from tests.lives.life import Life
from tests.lives.matrix import MatrixLife, matrix
from tests.lives.run import Built, apart, cpu, lives


@pytest.mark.parametrize(
    ("built", "number", "count"),
    [
        (cpu, 1, 3),
        (cpu, 10, 3),
        (matrix, 1, 2),
        pytest.param(matrix, 4, 2, marks=pytest.mark.slow),
        pytest.param(emulated, 4, 2, marks=pytest.mark.slow),
    ],
)
def test_lives_are_those_of_the_reference(built: Built, number: int, count: int) -> None:
    lived = lives(built, number, range(count))
    assert (lived.lives, lived.failures) == (count, [])


def other_cap(number: int, folder: Path) -> tuple[str, Callable[[Random], Life]]:
    """A module that is told to be of another soft cap than it is."""
    life = cpu(number, folder)[1](Random(0))
    (right,) = life.launches
    told = replace(right.spec, attention=replace(right.spec.attention, softcap=0.01))
    return "wrong", lambda draw: Life([Variant(told, right.layout, right.module)], draw)


def test_a_wrong_module_is_found() -> None:
    lived = lives(other_cap, 1, range(3))
    assert any("output" in failure for failure in lived.failures)


def does(what: str, number: int, folder: Path) -> tuple[str, Callable[[Random], object]]:
    """A variant whose lives do one thing."""

    class Does:
        calls = (what,)

        def live(self) -> None:
            if what == "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "raise":
                raise ValueError("raised")

    return what, lambda draw: Does()


@pytest.mark.slow
def test_a_process_that_is_lost_is_told() -> None:
    until = time.time() + 600
    assert apart(partial(does, "well"), 0, range(2), until).failures == []
    assert apart(partial(does, "crash"), 0, range(2), until).failures == ["variant 0, life 0: the process ended with status -9"]
    raised = apart(partial(does, "raise"), 0, range(2), until)
    assert raised.lives == len(raised.failures) == 1
    assert "ValueError: raised" in raised.failures[0]
    assert apart(partial(does, "well"), 0, range(2), time.time() - 1).lives == 0


def off(wrong: str) -> Callable[..., object]:
    """Operations on a matrix of which one result is wrong."""

    def call(name: str, x: torch.Tensor, scales: torch.Tensor, out: torch.Tensor | None = None) -> None:
        if name == "scales":
            scales.copy_(reference.scales(x[:-1] if wrong == "last row" else x))
        elif out is not None and name == "quantize":
            out.copy_(reference.codes(x, scales))
            if wrong == "one code beyond" and out.numel():
                out.as_strided((1,), (1,), out[-1:, -1:].storage_offset() + 1).fill_(1)
        elif out is not None:
            exact = reference.dequantized(x, scales, out.dtype)
            out.copy_(x.to(out.dtype) * scales.to(out.dtype) if wrong == "16 bits" else exact)

    return call


@pytest.mark.parametrize("wrong", ["", "last row", "one code beyond", "16 bits"])
def test_lives_of_a_matrix_find_what_is_wrong(wrong: str) -> None:
    def built(number: int, folder: Path) -> tuple[str, Callable[[Random], MatrixLife]]:
        return "named", lambda draw: MatrixLife(off(wrong), torch.float16, (3000, 1), draw)

    assert bool(lives(built, 0, range(40)).failures) == bool(wrong)
