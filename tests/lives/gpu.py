"""Random lives of caches on a GPU: variants of the whole language and of the whole search space, calls in any order.

    python -m tests.lives.gpu --count 2000 [--variants 100] [--seed 0] [--jobs N] [--seconds S] [--only VARIANT [--life N]] [--compile]

The variants of a seed are the same on every machine, and every feature of `cases.py` occurs in several. `--compile` puts them into the
cache of compiled modules (`KVGEN_CACHE_DIR`), which needs nvcc and no GPU. Lives run in processes side by side; one that crashes or hangs
loses its variant and no other. A failure is printed with the command that repeats it. Exit code 1 where one failed, or none was lived.
With `--target cpu` the lives are of variants of the CPU back end, to try this program.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from random import Random
from textwrap import fill

from kvgen.errors import KvgenError
from tests.lives import pool
from tests.lives.cases import LEAST, LifeCase, counted, drawn_cases, drawn_cpu_case
from tests.lives.command import parser
from tests.lives.layers import Wrong
from tests.lives.life import Life
from tests.lives.pool import Doing, Lost

LOAD_S, LIFE_S = 900.0, 120.0
"""Limits of loading a variant, which may have to be compiled, and of one life."""


@dataclass(frozen=True)
class Lived:
    """What was called in a life, and how it failed."""

    calls: tuple[str, ...]
    failure: str | None


class Unexpected(Exception):
    """What raised in a life is no difference from the reference: it names the calls."""


@dataclass(frozen=True)
class Lives:
    """Some lives of a variant. None begins after `until` (`time.time`)."""

    case: LifeCase
    seed: int
    variant: int
    numbers: Sequence[int]
    until: float

    def run(self) -> Iterator[object]:
        """One `Lived` each."""
        yield Doing("loading", LOAD_S)
        launch = self.case.compiled()
        for number in self.numbers:
            if time.time() >= self.until:
                return
            yield Doing(f"life {number}", LIFE_S)
            life = Life([launch], Random(f"{self.seed} {self.variant} {number}"), self.case.device, exact=self.case.exact)
            failure = None
            try:
                life.live()
            except Wrong as wrong:
                failure = f"life {number}: {wrong}\n  {'; '.join(life.calls)}"
            except Exception as error:
                raise Unexpected("; ".join(life.calls)) from error
            yield Lived(tuple(call.split()[0] for call in life.calls), failure)


def live(args: argparse.Namespace, cases: Sequence[LifeCase]) -> int:
    """Live, print what failed and a summary; the exit code."""
    start, until = time.monotonic(), time.time() + args.seconds
    chosen = range(len(cases)) if args.only is None else [args.only]
    tasks = [Lives(cases[n], args.seed, n, _numbers(args, place, len(chosen)), until) for place, n in enumerate(chosen)]
    tasks = sorted((task for task in tasks if task.numbers), key=lambda task: not task.case.foreign)  # PTX takes longest to load
    lived, failed, calls = 0, 0, Counter[str]()
    for number, given in pool.run(tasks, args.jobs, until):
        failure = None
        if isinstance(given, Lived):
            lived += 1
            calls.update(given.calls)
            failure = given.failure
        elif isinstance(given, Lost):
            failure = given.reason
        if failure is not None:
            failed += 1
            print(
                f"variant {tasks[number].variant}: {failure}\n{tasks[number].case}\n  {_again(args, tasks[number].variant)}\n", flush=True
            )
    found = counted([cases[n] for n in chosen])
    _print_counts("variants", found)
    few = [name for name, count in found.items() if count < LEAST]
    if few and args.only is None and args.target == "gpu":
        print(fill(f"in fewer than {LEAST} variants: {'; '.join(few)}", 140))
    _print_counts("calls", dict(calls))
    print(f"{lived} lives of {len(chosen)} variants, {failed} failed, {time.monotonic() - start:.0f} s")
    return int(failed > 0 or lived == 0)


def _print_counts(what: str, counts: Mapping[str, int]) -> None:
    print(fill(f"{what}: " + "; ".join(f"{name} {count}" for name, count in counts.items()), 140))


def _numbers(args: argparse.Namespace, place: int, variants: int) -> Sequence[int]:
    """Of the lives of a variant."""
    if args.life is not None:
        return [args.life]
    return range(args.count * (place + 1) // variants - args.count * place // variants)


def _again(args: argparse.Namespace, variant: int) -> str:
    on = " --target cpu" if args.target == "cpu" else ""
    return f"python -m tests.lives.gpu{on} --seed {args.seed} --variants {args.variants} --only {variant} --life N"


def compile_all(args: argparse.Namespace, cases: Sequence[LifeCase]) -> int:
    """Compile what is not compiled yet; the exit code."""
    start, failed, size = time.monotonic(), 0, 0
    with ThreadPoolExecutor(args.jobs) as threads:
        jobs = {threads.submit(cases[n].artifact): n for n in (range(len(cases)) if args.only is None else [args.only])}
        for job in as_completed(jobs):
            number = jobs[job]
            try:
                artifact = job.result()
            except KvgenError as error:
                failed += 1
                print(f"variant {number}: {_short(error)}\n{cases[number]}\n", flush=True)
                continue
            size += artifact.path.stat().st_size
            print(f"variant {number}: {artifact.path.stat().st_size >> 10} KiB, compiled in {artifact.resources.seconds:.0f} s", flush=True)
    print(f"{len(jobs)} variants, {size >> 20} MiB, {failed} failed, {time.monotonic() - start:.0f} s")
    return int(failed > 0)


def _short(error: KvgenError) -> str:
    """What it says first, and the errors in a compiler's log."""
    first, *log = str(error).splitlines()
    return "\n".join([f"{type(error).__name__}: {first}", *(line[:200] for line in log if "error" in line)])


def main(argv: Sequence[str] | None = None) -> int:
    """Compile or live; the exit code."""
    command = parser("gpu", __doc__, 2000)
    command.add_argument("--variants", type=int, default=100, help="variants that the lives are of")
    command.add_argument("--life", type=int, help="this life alone")
    command.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes side by side")
    command.add_argument("--seconds", type=float, default=float("inf"), help="no life begins later")
    command.add_argument("--compile", action="store_true", help="compile the variants, and live no life")
    command.add_argument("--target", choices=["gpu", "cpu"], default="gpu")
    args = command.parse_args(argv)
    if args.target == "cpu":
        draw = Random(args.seed)
        cases = [drawn_cpu_case(draw) for _ in range(args.variants)]
    else:
        cases = drawn_cases(args.seed, args.variants)
    if args.compile:
        return compile_all(args, cases)
    return live(args, cases)


if __name__ == "__main__":
    sys.exit(main())
