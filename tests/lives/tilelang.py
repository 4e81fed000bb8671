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

import torch

from tests.lives.command import failures, live, parser
from tests.lives.drawn import TILELANG, drawn_tilelang_schedule, drawn_tilelang_spec
from tests.lives.layers import require
from tests.lives.steps import Drawn, StepLife
from tests.unit.lower_tilelang.emulate import Emulated, Step, emulated, unquantized_rows

LIVES = 8
"""Of a variant: lowering takes longer than they do."""


class TileLife(StepLife[Step]):
    """Steps of both programs of a variant."""

    def __init__(self, built: Emulated, draw: Random) -> None:
        self.built = built
        super().__init__(built.spec, built.traits.tokens, draw, exact=built.traits.exact_q)

    def made(self, drawn: Drawn) -> Step:
        """With any number of splits, or a plan for any number of workers."""
        workers, splits = self.draw.choice([1, 2, 5, 11, 30]), self.draw.choice([1, 2, 3, 5, 8])
        return Step(
            self.built, self.held, drawn.q, splits, drawn.new, workers if drawn.planned else 0, drawn.skip_empty, drawn.limit,
            sinks=drawn.sinks,
        )  # fmt: skip

    def kept(self, step: Step, before: list[int], appended: bool) -> None:
        """Counters, residuals and which blocks were packed; without rollback `flush` stores the tokens of a step
        that packs a block, which `test_flush.py` looks at."""
        require(not step.counters.any(), "counters that the next call finds")
        rows, due = self.built.traits.rows, []
        for b, (old, length) in enumerate(zip(before, self.held.lengths.tolist(), strict=True)):
            fills = rows.packed_blocks(length) > rows.packed_blocks(old)
            if fills:
                due += [step.block_at(b, head, rows.packed_blocks(old)) for head in range(self.spec.attention.kv_heads)]
            if appended and (rows.rollback or not fills):
                own = unquantized_rows(rows, length)
                for mine, expected in zip(step.residual, self.held.residual(), strict=True):
                    require(torch.equal(mine[b][:, own], expected[b][:, own]), f"residual of sequence {b}")
        require(step.flushed == sorted(due), f"blocks {step.flushed} are packed, not {sorted(due)}")


def compiled(seed: int, folder: Path) -> tuple[Emulated, str]:
    """The variant of a number, and what it is."""
    draw = Random(seed)
    spec = drawn_tilelang_spec(draw)
    schedule = drawn_tilelang_schedule(draw, spec)
    return emulated(spec, schedule, folder), f"{spec.format()}\n{schedule}"


def lives(seed: int, count: int = LIVES) -> list[str]:
    """What failed of the lives of a number."""
    with tempfile.TemporaryDirectory(prefix="lives-") as folder:
        built, named = compiled(seed, Path(folder))
        return failures(seed, count, named, lambda draw: TileLife(built, draw))


def main(argv: Sequence[str] | None = None) -> int:
    """Live; the exit code."""
    args = parser("tilelang", __doc__, 200).parse_args(argv)
    if reason := TILELANG.missing():
        sys.exit(reason)
    return live(args, LIVES, lives)


if __name__ == "__main__":
    sys.exit(main())
