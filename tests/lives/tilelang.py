"""Random steps of emulated TileLang programs: specs of all that the back end supports, schedules of its whole space, hard data.

    python -m tests.lives.tilelang --count 200 [--seed 0] [--only N]

Each number is a lowered variant with some lives; a life is a cache that a reference holds, and some steps by either scheduler. A failure
is printed with its number. Exit code 1 where one failed.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

from tests.lives.command import failures, live, parser
from tests.lives.drawn import TILELANG, drawn_tilelang_schedule, drawn_tilelang_spec
from tests.lives.emulated import CudaLife
from tests.lives.steps import StepLife
from tests.unit.lower_tilelang.emulate import Emulated

LIVES = 8
"""Of a variant: lowering takes longer than they do."""


class TileLife(CudaLife):
    """Steps of both programs of a variant; packing is the CUDA headers'."""

    def __init__(self, built: Emulated, draw: Random) -> None:
        self.built = built
        StepLife.__init__(self, built.spec, built.layout.tokens, draw, exact=True)

    live = StepLife.live


def lives(seed: int, count: int = LIVES) -> list[str]:
    """What failed of the lives of a number."""
    with tempfile.TemporaryDirectory(prefix="lives-") as folder:
        draw = Random(seed)
        spec = drawn_tilelang_spec(draw)
        schedule = drawn_tilelang_schedule(draw, spec)
        built = Emulated(spec, schedule, Path(folder))
        return failures(seed, count, f"{spec.format()}\n{schedule}", lambda draw: TileLife(built, draw))


def main(argv: Sequence[str] | None = None) -> int:
    """Live; the exit code."""
    args = parser("tilelang", __doc__, 200).parse_args(argv)
    if reason := TILELANG.missing():
        sys.exit(reason)
    return live(args, LIVES, lives)


if __name__ == "__main__":
    sys.exit(main())
