"""Random steps of emulated CUDA kernels: specs of all that the back end supports, schedules of its whole space, hard data.

    python -m tests.lives.emulated --count 200 [--seed 0] [--only N]

Each number is a compiled variant with some lives; a life is a cache that a reference holds, some steps, crops between them, and the same
tokens packed in pieces by the emulated packer. A failure is printed with its number. Exit code 1 where one failed.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch

from kvgen._resources import templates
from kvgen.reference.cache import ReferenceCache
from kvgen.reference.quantize import torch_dtype
from kvgen.reference.tolerance import relative_l2, tolerance, worst_relative_l2
from kvgen.reference.window import window_places
from tests.lives.command import live, parser
from tests.lives.drawn import KINDS, dense, drawn_gpu_schedule, drawn_gpu_spec, drawn_query, drawn_sinks, drawn_tensor
from tests.lives.life import ROW_FACTOR, require
from tests.lives.packing import PackLife, drawn_crop
from tests.mutants.emulated_lives import headers_of
from tests.unit.lower_cuda import emulate
from tests.unit.lower_cuda.attend_checks import cached, cleared
from tests.unit.lower_cuda.emulate_attend import Emulated, Step

LIVES, STEPS = 5, 4


class StepLife:
    """Steps over a cache that starts with drawn lengths. Raises AssertionError or Wrong at the first difference."""

    def __init__(self, built: Emulated, draw: Random) -> None:
        self.built, self.spec, self.draw = built, built.spec, draw
        block, cache = built.layout.tokens, self.spec.cache
        edge = cache.unpacked + block
        edges = (0, 1, cache.sink, edge - 1, edge, edge + block - 1)
        sizes = (*edges, draw.randint(0, 400), draw.randint(0, 1200), draw.randint(0, 3 * block))
        self.batch = draw.randint(1, 4)
        self.held = ReferenceCache(self.spec, self.batch, block)
        lengths = [draw.choice(sizes) for _ in range(self.batch)]
        self.kinds = [draw.choice(KINDS) for _ in range(2)]
        self.held.prefill(*self.new(max(1, *lengths)), torch.tensor(lengths, dtype=torch.int32))
        self.calls = [f"lengths {lengths}, {self.kinds}"]

    def live(self) -> None:
        """Some steps."""
        for _ in range(STEPS):
            self.step()
            if self.spec.cache.rollback and self.draw.random() < 0.6:
                self.crop()

    def step(self) -> None:
        """`attend` or `decode`, by either scheduler."""
        draw, held = self.draw, self.held
        lengths: list[int] = held.lengths.tolist()
        tokens, planned, append = draw.randint(1, self.spec.attention.q_len), draw.random() < 0.5, draw.random() < 0.6
        skip = planned and draw.random() < 0.3
        limit = max(lengths) + tokens - 1 if append and draw.random() < 0.15 else 1 << 30
        q, sinks = dense(drawn_query(draw, self.spec, self.batch, tokens, held.keys_values()[0])), drawn_sinks(draw, self.spec)
        new = tuple(map(dense, self.new(tokens))) if append else None
        step = Step(
            self.built, held, q, (new[0], new[1]) if new else None, draw.random() < 0.5, draw.choice([1, 4, 7, 30]), planned, skip, limit,
            draw.random() < 0.5, sinks,
        )  # fmt: skip
        self.calls.append(
            f"{'decode' if append else 'attend'} {tokens}{' planned' if planned else ''}{' skip' if skip else ''} at {lengths}"
        )
        step.run()
        works = [length + tokens <= limit or (skip and not length) for length in lengths]
        if new:
            counts = torch.tensor([tokens * (there and not (skip and not n)) for there, n in zip(works, lengths, strict=True)])
            held.append(*new, counts)
        want = held.attend(q, sinks=sinks)
        held.flush()
        for b, there in enumerate(works):
            if not there:
                require(bool(step.out[b].isnan().all() & step.lse[b].isnan().all()), f"sequence {b} without room is written")
                step.out[b], step.lse[b] = want[0][b].to(q.dtype), want[1][b].float()
        cleared(step)
        require(relative_l2(step.out, want[0]) <= tolerance(q.dtype), f"relative l2 of the output is {relative_l2(step.out, want[0]):.3g}")
        worst = worst_relative_l2(step.out, want[0])
        require(worst <= ROW_FACTOR * tolerance(q.dtype), f"the worst row is off by {worst:.3g}")
        seen = torch.isfinite(want[1])
        require(torch.equal(torch.isfinite(step.lse), seen), "the LSE of a query that sees nothing")
        error = ((step.lse - want[1]).abs() / (1 + want[1].abs()))[seen]
        require(not error.numel() or float(error.max()) <= tolerance(q.dtype), "the LSE")
        require(step.lengths.tolist() == (lengths if planned or not new else held.lengths.tolist()), "lengths")
        if new:
            cached(step, held, tuple(lengths), held.lengths.tolist())

    def crop(self) -> None:
        """Take tokens back."""
        taken = drawn_crop(self.draw, self.held)
        self.calls.append(f"crop {taken.tolist()}")
        self.held.crop(taken)

    def new(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V."""
        k, v = (drawn_tensor(self.draw, kind, self.batch, tokens, self.spec.attention.kv_heads, self.spec) for kind in self.kinds)
        return k, v


def compiled(seed: int, folder: Path) -> tuple[Emulated, emulate.Emulated, str]:
    """The attention and the packing kernels of a number, and what they are."""
    draw = Random(seed)
    spec = drawn_gpu_spec(draw)
    schedule = drawn_gpu_schedule(draw, spec)
    built = Emulated(spec, schedule.layout.integer("block"), schedule.launch, folder / "attend")
    rows, places = ReferenceCache(spec, 1, built.layout.tokens).rows, window_places(spec, built.layout.tokens)
    packer = emulate.Emulated(built.layout, torch_dtype(spec.attention.dtype), folder / "pack", rows, places)
    return built, packer, f"{spec.format()}\n{schedule}"


def lives(seed: int, count: int = LIVES) -> list[str]:
    """What failed of the lives of a number."""
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="lives-") as folder:
        built, packer, named = compiled(seed, Path(folder))
        for number in range(count):
            steps = StepLife(built, Random(seed * 1000 + number))
            try:
                steps.live()
                PackLife(packer, built.spec, built.layout, Random(seed * 1000 + 500 + number)).live()
            except Exception as error:
                what = "".join(traceback.format_exception(error)[-2:]).strip()
                failures.append(f"life {number} of {seed}: {what}\n{named}\n  {'; '.join(steps.calls)}")
    return failures


def main(argv: Sequence[str] | None = None) -> int:
    """Live; the exit code."""
    command = parser("emulated", __doc__, 200)
    command.add_argument("--templates", type=Path, default=templates(), help="the folder of the headers")
    args = command.parse_args(argv)

    def over_headers(seed: int) -> list[str]:
        with headers_of(args.templates):
            return lives(seed)

    return live(args, LIVES, over_headers)


if __name__ == "__main__":
    sys.exit(main())
