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


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))
