"""Kernels that are timed in turns, so that what changes while a benchmark runs (clocks, heat) changes for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

K = TypeVar("K")
Timer = Callable[[], Iterable[float]]
"""Gives samples in µs of one kernel's turn."""
READ_EVERY = 3


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
