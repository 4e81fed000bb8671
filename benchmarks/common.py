"""What the benchmarks have in common: options, turns of the kernels that are compared, and files of results."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pandas as pd

from kvgen._machine import gpu_identity
from kvgen.bench.run import facts, write_csv

if TYPE_CHECKING:
    from kvgen.measure.measurement import TimingPolicy

RESULTS = Path(__file__).parent / "results"
READ_EVERY = 3
K = TypeVar("K")
Timer = Callable[[], Iterable[float]]
"""Gives samples in µs of one kernel's turn."""


def parser(doc: str | None, rounds: int = 9) -> argparse.ArgumentParser:
    """A parser that prints the benchmark's docstring as it is, with `--rounds`: how often every kernel takes its turn."""
    command = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--rounds", type=int, default=rounds)
    return command


def take_turns(
    kernels: Mapping[K, Timer], rounds: int, reads: Mapping[int, Timer] | None = None
) -> tuple[dict[K, list[float]], dict[int, list[float]]]:
    """Samples of every kernel, one turn each per round, and of reads by their bytes, after the kernels of every third round.

    Every round begins with the next kernel, so that none always follows the same one: under load the clocks depend on what ran before.
    """
    names = list(kernels)
    samples: dict[K, list[float]] = {name: [] for name in kernels}
    read: dict[int, list[float]] = {nbytes: [] for nbytes in reads or {}}
    for number in range(rounds):
        first = number % max(1, len(names))
        for name in names[first:] + names[:first]:
            samples[name] += kernels[name]()
        if number % READ_EVERY == 0:
            for nbytes, timer in (reads or {}).items():
                read[nbytes] += timer()
    return samples, read


def gpu_word() -> str:
    """The visible GPU in a word: `h100` for an NVIDIA H100 80GB HBM3; `gpu`, if there is none."""
    words = gpu_identity().get("name", "").lower().split()
    return next((word for word in words if any(map(str.isdigit, word))), "gpu")


def gpu_facts(policy: TimingPolicy) -> dict[str, Any]:
    """Columns that say on which GPU, with which versions, how and when rows were measured."""
    return {name: fact for name, fact in facts("sm90", policy).items() if name != "threads"}


def write_rows(name: str, rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> None:
    """Rows, each with the run's facts, as NAME.csv in $OUT or benchmarks/results; what a reader finds there is always whole."""
    write_csv(Path(os.environ.get("OUT") or RESULTS) / f"{name}.csv", pd.DataFrame(list(rows)).assign(**about))
