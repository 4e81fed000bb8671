"""What the command lines of the benchmarks have in common."""

from __future__ import annotations

import argparse
import os


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser that prints the benchmark's docstring as it is."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_rounds(command: argparse.ArgumentParser) -> None:
    """`--rounds`: how often every kernel takes its turn."""
    command.add_argument("--rounds", type=int, default=9)


def add_sweep(command: argparse.ArgumentParser) -> None:
    """What a sweep of schedules asks besides (`gpu_decode.compile_all`)."""
    add_rounds(command)
    command.add_argument("--logit", type=float, default=4.0)
    command.add_argument("--workers", type=int, default=processors())


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))
