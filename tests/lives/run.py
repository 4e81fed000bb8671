"""What a variant of random lives is, and its lives: here, or in a process of its own, which imports this module."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
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

from kvgen.errors import CheckError, CompileError, CompilerCrash
from kvgen.runtime.calls import Variant
from kvgen.runtime.module import load
from kvgen.toolchain import build
from tests.lives.cases import LifeCase
from tests.lives.draw import CPU, drawn_schedule, drawn_spec
from tests.lives.life import Life, Wrong
from tests.unit.lower_cuda import race_checks

LOAD_S, LIFE_S, END_S = 900.0, 120.0, 10.0
"""Limits of loading a variant, which may have to be compiled, of one life, and of the end of a process."""


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
    until: float = float("inf"),
    begins: Callable[[str, float], object] = lambda what, limit_s: None,
) -> Lived:
    """Live these lives of a variant, none after `until` (`time.time`). What is no difference from a reference ends the others, too.

    `begins` is told what begins, and after how many seconds it hangs.
    """
    lived = Lived(number, 0, [])
    with tempfile.TemporaryDirectory(prefix="lives-") as folder, race_checks.enabled(races):
        if time.time() >= until:
            return lived
        begins("loading", LOAD_S)
        try:
            named, made = built(number, Path(folder))
        except (CompileError, CompilerCrash, CalledProcessError) as error:
            return Lived(number, 0, [f"variant {number}: {type(error).__name__}: {error}"])
        for which in numbers:
            if time.time() >= until:
                break
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


def apart(built: Built, number: int, numbers: Sequence[int], until: float) -> Lived:
    """`lives` in a process of its own: a GPU's context does not survive a fault of a kernel."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, built, number, numbers, until), daemon=True)
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


def _serve(connection: Connection, built: Built, number: int, numbers: Sequence[int], until: float) -> None:
    torch.set_num_threads(1)  # there are as many processes as processors
    with suppress(BrokenPipeError):
        connection.send(lives(built, number, numbers, until=until, begins=lambda *what: connection.send(what)))
