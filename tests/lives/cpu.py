"""Random lives of caches on the CPU: specs of the whole language, schedules of the whole space, calls in any order.

    python -m tests.lives.cpu --count 1500 [--seed 0] [--only N]

Each number is a spec, its launches and some lives; a failure is printed with the command that repeats it. Exit code 1 where one failed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from random import Random

from kvgen.lower.schedule import Schedule, layout_of
from kvgen.runtime.module import load
from kvgen.runtime.variant import Variant
from kvgen.spec import KernelSpec
from kvgen.toolchain import build
from tests.lives.command import failures, live, parser
from tests.lives.drawn import CPU, drawn_schedule, drawn_spec
from tests.lives.life import Life

LIVES = 8
"""Of a compiled spec."""


def compiled(spec: KernelSpec, schedules: Sequence[Schedule]) -> list[Variant]:
    """Launches over caches of one layout."""
    layout = layout_of(spec, schedules[0].layout)
    return [Variant(spec, layout, load(build(CPU.lower(spec, schedule, "cpu")).path)) for schedule in schedules]


def drawn(seed: int) -> tuple[KernelSpec, list[Schedule]]:
    """The spec of a number, and one or two schedules of one layout."""
    draw = Random(seed)
    spec = drawn_spec(draw)
    first = drawn_schedule(draw, spec)
    more = [drawn_schedule(draw, spec, first.layout)] if draw.random() < 0.25 else []
    return spec, [first, *more]


def lives(seed: int, count: int = LIVES) -> list[str]:
    """What failed of the lives of a number."""
    spec, schedules = drawn(seed)
    launches = compiled(spec, schedules)
    return failures(seed, count, f"{spec.format()}\n{[str(schedule) for schedule in schedules]}", lambda draw: Life(launches, draw))


def main(argv: Sequence[str] | None = None) -> int:
    """Live; the exit code."""
    return live(parser("cpu", __doc__, 1500).parse_args(argv), LIVES, lives)


if __name__ == "__main__":
    sys.exit(main())
