"""The command of random lives: what `python -m tests.lives.cpu`, `emulated`, `tilelang`, `matrix` and `gpu` have in common."""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Sequence
from random import Random
from subprocess import CalledProcessError
from typing import Protocol

from kvgen.errors import CompileError, CompilerCrash


class AnyLife(Protocol):
    """Calls that are compared with a reference."""

    calls: list[str]
    """What was called so far."""

    def live(self) -> None:
        """All calls. Raises at the first difference."""


def parser(name: str, doc: str | None, count: int) -> argparse.ArgumentParser:
    """The options; `count` lives by default."""
    command = argparse.ArgumentParser(prog=f"python -m tests.lives.{name}", description=doc)
    command.add_argument("--count", type=int, default=count, help="lives in all")
    command.add_argument("--seed", type=int, default=0, help="the first number")
    command.add_argument("--only", type=int, help="a number")
    return command


def failures(seed: int, count: int, named: str, made: Callable[[Random], AnyLife]) -> list[str]:
    """What failed of so many lives of a number, whose variant is `named`."""
    found = []
    for number in range(count):
        life = made(Random(seed * 1000 + number))
        try:
            life.live()
        except Exception as error:
            what = "".join(traceback.format_exception(error)[-2:]).strip()
            found.append(f"life {number} of {seed}: {what}\n{named}\n  {'; '.join(life.calls)}")
    return found


def live(args: argparse.Namespace, each: int, lives: Callable[[int], Sequence[str]]) -> int:
    """Live the numbers that the options name, `each` lives of every number, and print what failed; the exit code. A variant that cannot be
    built has failed, and the others go on.
    """
    numbers = [args.only] if args.only is not None else range(args.seed, args.seed + -(-args.count // each))
    failed, start = 0, time.monotonic()
    for seed in numbers:
        try:
            found = lives(seed)
        except (CompileError, CompilerCrash, CalledProcessError) as error:
            found = [f"{seed}: {type(error).__name__}: {error}"]
        failed += len(found)
        for failure in found:
            print(failure, flush=True)
    print(f"{each * len(numbers)} lives from {numbers[0]} on, {failed} failed, {time.monotonic() - start:.0f} s")
    return int(failed > 0)
