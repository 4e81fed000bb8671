"""Random steps of emulated TileLang programs: specs of all that the back end supports, schedules of its whole space, hard data."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

from tests.lives.draw import TILELANG, drawn_schedule, drawn_tilelang_spec
from tests.lives.emulated import StepLife
from tests.unit.lower_tilelang.emulate import Emulated


def tilelang(number: int, folder: Path) -> tuple[str, Callable[[Random], StepLife]]:
    """Both programs of a number's variant; packing is the CUDA headers'."""
    if reason := TILELANG.missing():
        sys.exit(reason)
    draw = Random(number)
    spec = drawn_tilelang_spec(draw)
    schedule = drawn_schedule(draw, TILELANG, spec, "sm90")
    built = Emulated(spec, schedule, folder)
    return f"{spec.format()}\n{schedule}", lambda draw: StepLife(built, draw)
