"""What a variant of random lives is, and its lives: here, or in a process of its own, which imports this module."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from subprocess import CalledProcessError
from typing import Protocol

import torch

from kvgen.arch import Target
from kvgen.errors import CheckError, CompileError, CompilerCrash
from kvgen.format.layout import PackedLayout
from kvgen.lower.backend import get_backend
from kvgen.lower.schedule import Schedule, layout_of
from kvgen.runtime.calls import Variant
from kvgen.runtime.module import load
from kvgen.spec import KernelSpec
from kvgen.toolchain import Artifact, build
from tests.lives.draw import CPU, CUDA, TILELANG, drawn_gpu_spec, drawn_schedule, drawn_spec, drawn_tilelang_spec
from tests.lives.life import Life, Wrong
from tests.unit.lower_cuda import race_checks

LOAD_S, LIFE_S, END_S = 900.0, 120.0, 10.0
"""Limits of loading a variant, which may have to be compiled, of one life, and of the end of a process."""


@dataclass(frozen=True)
class LifeCase:
    """A spec, one of its schedules, and the target that it is compiled for."""

    spec: KernelSpec
    schedule: Schedule
    target: Target

    def __str__(self) -> str:
        return f"{self.spec.format()}\n{self.schedule}\nfor {self.target}"

    @property
    def layout(self) -> PackedLayout:
        """Its packed layout."""
        return layout_of(self.spec, self.schedule.layout)

    @property
    def foreign(self) -> bool:
        """Whether an SM90 GPU runs it through its PTX."""
        return self.target in ("sm80", "sm89")

    def artifact(self) -> Artifact:
        """The module, from the cache or compiled now. Raises UnsupportedError, CompileError."""
        source = get_backend(self.schedule.backend).lower(self.spec, self.schedule, self.target)
        return build(source)

    def compiled(self) -> Variant:
        """The module, loaded. Raises as `artifact` does."""
        return Variant(self.spec, self.layout, load(self.artifact().path))


def drawn_cases(seed: int, count: int) -> list[LifeCase]:
    """Cases for a GPU, the same on every machine: mostly CUDA's for SM90; some of TileLang's, some for older targets."""
    draw, cases = Random(seed), []
    for _ in range(count):
        backend = draw.choices([TILELANG, CUDA], [1, 9])[0]
        target: Target = draw.choices(["sm80", "sm89", "sm90"], [1, 1, 16])[0] if backend is CUDA else "sm90"  # type: ignore[assignment]
        spec = drawn_gpu_spec(draw, target) if backend is CUDA else drawn_tilelang_spec(draw)
        cases.append(LifeCase(spec, drawn_schedule(draw, backend, spec, target), target))
    return cases


class AnyLife(Protocol):
    """Calls that are compared with a reference."""

    calls: list[str]
    """What was called so far."""

    def live(self) -> None:
        """All calls. Raises at the first difference."""


Built = Callable[[int, Path], tuple[str, Callable[[Random], AnyLife]]]
"""From a variant's number and a folder: what it is, and its lives."""


def cpu(number: int, folder: Path) -> tuple[str, Callable[[Random], AnyLife]]:
    """A spec, and one or two schedules of one layout."""
    draw = Random(number)
    spec = drawn_spec(draw)
    schedules = [drawn_schedule(draw, CPU, spec, "cpu")]
    if draw.random() < 0.25:
        schedules.append(drawn_schedule(draw, CPU, spec, "cpu", schedules[0].layout))
    layout = LifeCase(spec, schedules[0], "cpu").layout
    launches = [Variant(spec, layout, load(build(CPU.lower(spec, schedule, "cpu")).path)) for schedule in schedules]
    return f"{spec.format()}\n{[str(schedule) for schedule in schedules]}", lambda draw: Life(launches, draw)


def on_gpu(case: LifeCase, number: int, folder: Path) -> tuple[str, Callable[[Random], AnyLife]]:
    """A variant on a GPU."""
    launch = case.compiled()
    return str(case), lambda draw: Life([launch], draw, "cuda", exact=case.schedule.exact)


@dataclass
class Lived:
    """What became of a variant's lives."""

    number: int
    lives: int
    failures: list[str]


def lives(
    built: Built,
    number: int,
    numbers: Sequence[int],
    *,
    races: bool = False,
    begins: Callable[[str, float], object] = lambda what, limit_s: None,
) -> Lived:
    """Live these lives of a variant. What is no difference from a reference ends the others, too.

    `begins` is told what begins, and after how many seconds it hangs.
    """
    lived = Lived(number, 0, [])
    with tempfile.TemporaryDirectory(prefix="lives-") as folder, race_checks.enabled(races):
        begins("loading", LOAD_S)
        try:
            named, made = built(number, Path(folder))
        except (CompileError, CompilerCrash, CalledProcessError) as error:
            return Lived(number, 0, [f"variant {number}: {type(error).__name__}: {error}"])
        for which in numbers:
            begins(f"life {which}", LIFE_S)
            life = made(Random(number * 1000 + which))
            lived.lives += 1
            try:
                life.live()
            except Exception as error:
                what = "".join(traceback.format_exception(error)[-2:]).strip()
                lived.failures.append(f"variant {number}, life {which}: {what}\n{named}\n  {'; '.join(life.calls)}")
                if not isinstance(error, (Wrong, CheckError, AssertionError)):
                    break
        lived.failures += [f"variant {number}: {report}\n{named}" for report in race_checks.reports(Path(folder))]
    return lived


def apart(built: Built, number: int, numbers: Sequence[int]) -> Lived:
    """`lives` in a process of its own: a GPU's context does not survive a fault of a kernel."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, built, number, numbers), daemon=True)
    process.start()
    theirs.close()
    what, limit_s, begun = "start", LOAD_S, -1
    try:
        while mine.poll(limit_s):
            told = mine.recv()
            if isinstance(told, Lived):
                return told
            (what, limit_s), begun = told, begun + 1
        ended = f"it took longer than {limit_s:g} s"
    except (EOFError, OSError):
        process.join(END_S)
        ended = f"the process ended with status {process.exitcode}"
    finally:
        process.kill()
        process.join(END_S)  # a GPU that hangs may keep it for a while
    return Lived(number, max(begun, 0), [f"variant {number}, {what}: {ended}"])


def _serve(connection: Connection, built: Built, number: int, numbers: Sequence[int]) -> None:
    torch.set_num_threads(1)  # there are as many processes as processors
    with suppress(BrokenPipeError):
        connection.send(lives(built, number, numbers, begins=lambda *what: connection.send(what)))
