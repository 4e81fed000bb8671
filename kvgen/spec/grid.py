"""The grid of the (batch, tokens) plane: the workloads at which launches are measured, and for which an untuned kernel has defaults.

The workloads are in the order in which they are measured. A cut-off leaves a coarse grid of everything rather than a part of a fine one:
powers of four come first, with equal lengths and then with unequal ones; then batches whose heads fill the GPU badly; then the sustained
cells; then every second point between powers of four, and the rest. Within a step, the middle of the plane comes before its borders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvgen.arch import Target
from kvgen.spec.dispatch import Dispatch, Measured
from kvgen.spec.distance import mean_length
from kvgen.spec.model import MAX_KV_LEN, KernelSpec, Lengths, Workload

SPREAD = 64
"""Longest over shortest sequence of a cell of unequal lengths."""
LONGER = 4
"""A cell of unequal lengths goes with one of equal lengths L: its longest sequence has LONGER * L tokens, and the mean is .95 L, so that
both have about as many tokens.
"""


@dataclass(frozen=True)
class Grid:
    """Batches and lengths, powers of two in ascending order, of which every pair up to `most_tokens` is a cell."""

    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    """Tokens per sequence."""
    most_tokens: int
    """In all sequences together."""
    sustained: tuple[tuple[int, int], ...] = ()
    """Pairs that are measured under a sustained load, too."""
    screened: tuple[tuple[int, int], ...] = ()
    """Pairs at which many launches are timed once, to find those that are measured over the grid (*screening*)."""
    uneven: tuple[tuple[int, int], ...] = ()
    """Pairs beside the others, with equal lengths. With a batch that is a power of two, as with the usual numbers of heads, the last CTAs
    to run are nearly as many as the GPU holds; with these batches they are fewer, and other launches are the fastest.
    """

    def cells(self, q_len: int = 1) -> list[Workload]:
        """The workloads of the grid, in the order in which they are measured."""
        pairs = [(batch, length) for batch in self.batches for length in self.lengths if batch * length <= self.most_tokens]
        pairs.sort(key=self._from_middle)
        coarse = [pair for pair in pairs if self._step(pair) == 0]
        uneven = sorted(self.uneven, key=self._from_middle)
        order = [*equal(coarse, q_len), *unequal(coarse, q_len), *equal(uneven, q_len), *sustained(self.sustained, q_len)]
        for step in (1, 2):
            finer = [pair for pair in pairs if self._step(pair) == step]
            order += [*equal(finer, q_len), *unequal(finer, q_len)]
        return [work for work in order if work.shortest >= q_len]

    def anchors(self, q_len: int = 1) -> list[Workload]:
        """The workloads of screening: those with equal lengths, then every second pair with unequal ones."""
        pairs = list(self.screened)
        both = [*equal(pairs, q_len), *unequal(pairs[1::2], q_len)]
        return [work for work in both if work.shortest >= q_len]

    def _step(self, pair: tuple[int, int]) -> int:
        """0 for powers of four of the smallest batch and length, 1 for every second of the other points, 2 for the rest."""
        at = math.log2(pair[0] / self.batches[0]), math.log2(pair[1] / self.lengths[0])
        if at[0] % 2 == 0 and at[1] % 2 == 0:
            return 0
        return 1 if (at[0] + at[1]) % 2 == 0 else 2

    def _from_middle(self, pair: tuple[int, int]) -> tuple[float, tuple[int, int]]:
        middle = math.sqrt(self.batches[0] * self.batches[-1]), math.sqrt(self.lengths[0] * self.lengths[-1])
        return sum(abs(math.log2(value / centre)) for value, centre in zip(pair, middle, strict=True)), pair


def reached(measured: Sequence[Workload], missing: Sequence[Workload]) -> float:
    """Part of these workloads at which a call would find a measured one near enough to decide."""
    look_up = Dispatch([Measured(work, 0) for work in measured], 0)

    def found(work: Workload) -> bool:
        return look_up.cell(work.batch, work.kv_len, work.q_len, round(work.batch * mean_length(work))) is not None

    return (len(measured) + sum(map(found, missing))) / (len(measured) + len(missing))


def equal(pairs: list[tuple[int, int]], q_len: int) -> Iterator[Workload]:
    """Workloads of equal lengths."""
    for batch, length in pairs:
        yield Workload(batch=batch, kv_len=length, q_len=q_len)


def unequal(pairs: list[tuple[int, int]], q_len: int) -> Iterator[Workload]:
    """Workloads of log-uniform lengths with about as many tokens, of two sequences or more."""
    for batch, length in pairs:
        if batch > 1 and length * LONGER <= MAX_KV_LEN and length * LONGER >= SPREAD:
            yield Workload(batch=batch, kv_len=length * LONGER, q_len=q_len, lengths=Lengths(min=length * LONGER // SPREAD))


def sustained(pairs: tuple[tuple[int, int], ...], q_len: int) -> Iterator[Workload]:
    """Workloads of equal lengths under a sustained load."""
    for batch, length in pairs:
        yield Workload(batch=batch, kv_len=length, q_len=q_len, load="sustained")


def powers(low: int, high: int) -> tuple[int, ...]:
    """Powers of two from `low` to `high`."""
    return tuple(low << step for step in range((high // low).bit_length()))


GPU = Grid(
    powers(1, 1024),
    powers(512, 1 << 20),
    1 << 22,
    sustained=((8, 32768), (32, 8192), (128, 8192), (1, 262144), (16, 131072), (512, 2048)),
    screened=((1, 4096), (4, 8192), (16, 2048), (64, 1024), (1, 131072), (256, 2048), (64, 16384), (1024, 512), (3, 2048)),
    uneven=tuple((batch, length) for batch in (3, 6, 12, 24, 48) for length in (2048, 8192, 32768)),
)
CPU = Grid(powers(1, 32), powers(512, 1 << 17), 1 << 17, screened=((1, 4096), (8, 2048), (1, 65536), (32, 1024)))
"""A CPU is timed without pauses anyway, and reads a hundredth as fast: it has no sustained cells, and fewer tokens."""


def grid_of(target: Target) -> Grid:
    """The grid of a target."""
    return CPU if target == "cpu" else GPU


def q_len_of(spec: KernelSpec) -> int:
    """Query tokens of the grid's workloads: those of the spec's workload of the largest weight."""
    return max(spec.workloads, key=lambda work: work.weight).q_len
