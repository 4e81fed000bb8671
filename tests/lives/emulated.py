"""Random steps of emulated CUDA kernels: specs of all that the back end supports, schedules of its whole space, hard data.

    python -m tests.lives.emulated --count 200 [--seed 0] [--only N] [--races]

Each number is a compiled variant with some lives; a life is a cache that a reference holds, some steps, crops between them, and the same
tokens packed in pieces by the emulated packer. A failure is printed with its number. Exit code 1 where one failed. With --races, data
races and misaligned accesses are failures, too.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random

from kvgen.format.window import window_places
from kvgen.verify.cache import ReferenceCache
from kvgen.verify.quantize import torch_dtype
from tests.lives.command import failures, live, parser
from tests.lives.drawn import drawn_gpu_schedule, drawn_gpu_spec
from tests.lives.packing import PackLife
from tests.lives.steps import Drawn, StepLife
from tests.unit.lower_cuda import emulate, race_checks
from tests.unit.lower_cuda.attend_checks import cached, cleared
from tests.unit.lower_cuda.emulate_attend import Emulated, Step

LIVES = 5


class CudaLife(StepLife[Step]):
    """Steps of the CUDA kernels, then prefills in pieces by the packer."""

    def __init__(self, built: Emulated, packer: emulate.Emulated, draw: Random) -> None:
        self.built, self.packer = built, packer
        super().__init__(built.spec, built.layout.tokens, draw, exact=built.exact)

    def live(self) -> None:
        """Steps, then prefills."""
        super().live()
        PackLife(self.packer, self.spec, self.built.layout, self.draw).live()

    def made(self, drawn: Drawn) -> Step:
        """On any number of multiprocessors, CTAs in either order."""
        draw = self.draw
        return Step(
            self.built, self.held, drawn.q, drawn.new, draw.random() < 0.5, draw.choice([1, 4, 7, 30]), drawn.planned, drawn.skip_empty,
            drawn.limit, draw.random() < 0.5, drawn.sinks,
        )  # fmt: skip

    def kept(self, step: Step, before: list[int], appended: bool) -> None:
        """Counters, residuals and packed blocks."""
        cleared(step)
        if appended:
            cached(step, self.held, tuple(before), self.held.lengths.tolist())


def compiled(seed: int, folder: Path) -> tuple[Emulated, emulate.Emulated, str]:
    """The attention and the packing kernels of a number, and what they are."""
    draw = Random(seed)
    spec = drawn_gpu_spec(draw)
    schedule = drawn_gpu_schedule(draw, spec, emulated=True)
    built = Emulated(spec, schedule.layout.integer("block"), schedule.launch, folder / "attend")
    rows, places = ReferenceCache(spec, 1, built.layout.tokens).rows, window_places(spec, built.layout.tokens)
    packer = emulate.Emulated(built.layout, torch_dtype(spec.attention.dtype), folder / "pack", rows, places)
    return built, packer, f"{spec.format()}\n{schedule}"


def lives(seed: int, count: int = LIVES, races: bool = False) -> list[str]:
    """What failed of the lives of a number."""
    with tempfile.TemporaryDirectory(prefix="lives-") as folder, race_checks.enabled(races):
        built, packer, named = compiled(seed, Path(folder))
        failed = failures(seed, count, named, lambda draw: CudaLife(built, packer, draw))
        return [*failed, *(f"lives of {seed}: {report}\n{named}" for report in race_checks.reports(Path(folder)))]


def main(argv: Sequence[str] | None = None) -> int:
    """Live; the exit code."""
    command = parser("emulated", __doc__, 200)
    command.add_argument("--races", action="store_true", help="look for data races and misaligned accesses")
    args = command.parse_args(argv)
    if args.races and (why := race_checks.unsupported()):
        command.error(f"--races needs another compiler: {why}")

    return live(args, LIVES, partial(lives, races=args.races))


if __name__ == "__main__":
    sys.exit(main())
