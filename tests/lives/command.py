"""The command of random lives: what `python -m tests.lives.cpu` and `tests.lives.emulated` have in common."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence


def parser(name: str, doc: str | None, count: int) -> argparse.ArgumentParser:
    """The options; `count` lives by default."""
    command = argparse.ArgumentParser(prog=f"python -m tests.lives.{name}", description=doc)
    command.add_argument("--count", type=int, default=count, help="lives in all")
    command.add_argument("--seed", type=int, default=0, help="the first number")
    command.add_argument("--only", type=int, help="a number")
    return command


def live(args: argparse.Namespace, each: int, lives: Callable[[int], Sequence[str]]) -> int:
    """Live the numbers that the options name, `each` lives of every number, and print what failed; the exit code."""
    numbers = [args.only] if args.only is not None else range(args.seed, args.seed + -(-args.count // each))
    failed, start = 0, time.monotonic()
    for seed in numbers:
        failures = lives(seed)
        failed += len(failures)
        for failure in failures:
            print(failure, flush=True)
    print(f"{each * len(numbers)} lives from {numbers[0]} on, {failed} failed, {time.monotonic() - start:.0f} s")
    return int(failed > 0)
