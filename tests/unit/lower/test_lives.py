"""A few random lives of the long check `python -m tests.lives`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from kvgen.runtime.calls import Variant
from tests.lives.life import Life
from tests.lives.run import cpu, lives


@pytest.mark.parametrize("number", [1, 10])
def test_lives_are_those_of_the_reference(number: int) -> None:
    """The emulator's are in lower_cuda/test_races.py."""
    lived = lives(cpu, number, range(2))
    assert (lived.lives, lived.failures) == (2, [])


def other_cap(number: int, folder: Path) -> tuple[str, Callable[[Random], Life]]:
    """A module that is told to be of another soft cap than it is."""
    life = cpu(number, folder)[1](Random(0))
    (right,) = life.launches
    told = replace(right.spec, attention=replace(right.spec.attention, softcap=0.01))
    return "wrong", lambda draw: Life([Variant(told, right.layout, right.module)], draw)


def test_a_wrong_module_is_found() -> None:
    lived = lives(other_cap, 1, range(3))
    assert any("output" in failure for failure in lived.failures)
