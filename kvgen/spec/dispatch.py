"""Which launch of a kernel serves a call: the one look-up of `Kernel`, the torch operators and exports.

A table of measured workloads decides, if the kernel has one: the launch that is fastest at the measured workload nearest to the call, and
the default where none is near. Without a table, the launch that was tuned for the nearest workload serves, however far away that is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvgen.spec.distance import Coordinates, coordinates, coordinates_of, nearest

if TYPE_CHECKING:
    from kvgen.spec.model import Workload
    from kvgen.spec.operations import AnyWorkload

REACH = 1.0
"""Doublings of batch, of tokens and of q_len, each, up to which a measured workload speaks for a call."""
UNEQUAL = 1.0
"""Distance of a workload of equal lengths from a call of which the host knows neither the tokens nor that lengths are equal."""
STEPS = 8
"""Steps per doubling to which the tokens of a call are rounded, so that a growing cache rarely asks anew."""
REMEMBERED = 4096


class Dispatch:
    """Maps what the host knows of a call to the index of a launch. Thread-safe; without torch."""

    def __init__(self, tuned: Sequence[tuple[Workload, int]], default: int | None = None, *, sustained: bool = False) -> None:
        """`tuned` are workloads with the index of the launch that serves each. `default` is the launch beyond all of them; None: there is
        no table, and the nearest serves. `sustained`: prefer what was measured under a sustained load.
        """
        self._cells = [coordinates_of(workload) for workload, _ in tuned]
        self._launches = [launch for _, launch in tuned]
        self._default = default
        self._sustained = sustained
        self._known: dict[tuple[int, int, int, int | None], int] = {}
        """By call."""
        self._rounded: dict[tuple[int, int, int, int | None], int] = {}
        """By call, its tokens in steps."""

    @classmethod
    def only(cls) -> Dispatch:
        """The look-up of a kernel with one launch."""
        return cls([], 0)

    def launch(self, batch: int, bound: int, q_len: int = 1, tokens: int | None = None) -> int:
        """Index of the launch for `batch` sequences, the longest of `bound` tokens at most, with `q_len` query tokens each.

        `tokens` is the number of all sequences together: batch x bound where all are equal, None where the host does not know it.
        """
        call = (batch, bound, q_len, tokens)
        found = self._known.get(call)
        if found is None:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            found = self._known[call] = self._find(batch, bound, q_len, tokens)
        return found

    def _find(self, batch: int, bound: int, q_len: int, tokens: int | None) -> int:
        if self._default is None:
            return self._launches[nearest(self._cells, coordinates(batch, bound, q_len, tokens, sustained=self._sustained))]
        call = (batch, _step(bound), q_len, None if tokens is None else _step(tokens))
        found = self._rounded.get(call)
        if found is None:
            if len(self._rounded) >= REMEMBERED:
                self._rounded.clear()
            cell = self.cell(batch, bound, q_len, tokens)
            found = self._rounded[call] = self._default if cell is None else self._launches[cell]
        return found

    def cell(self, batch: int, bound: int, q_len: int = 1, tokens: int | None = None) -> int | None:
        """Index of the measured workload that decides for such a call; None where none is within REACH."""
        longest = 2.0 ** (_step(bound) / STEPS)
        total = None if tokens is None else 2.0 ** (_step(tokens) / STEPS)
        call = coordinates(batch, 1, q_len, sustained=self._sustained)
        most = call[0] + math.log2(longest)
        unequal = None if total is None else max(0.0, most - math.log2(total))
        away = [_away(cell, call, most, unequal) for cell in self._cells]
        closest = min(away, default=math.inf)
        return away.index(closest) if math.isfinite(closest) else None


def prefers_sustained(workloads: Sequence[AnyWorkload]) -> bool:
    """Whether most of the traffic, by weight, is under a sustained load. Shapes of matrices say nothing of it."""
    sustained = sum(work.weight for work in workloads if getattr(work, "load", "rested") == "sustained")
    return 2 * sustained > sum(work.weight for work in workloads)


def _step(tokens: int) -> int:
    return round(STEPS * math.log2(max(1, tokens)))


def _away(cell: Coordinates, call: Coordinates, most: float, unequal: float | None) -> float:
    """Distance of a measured workload from a call of 2^most tokens at most, 2^(most - unequal) in fact; infinite beyond REACH.

    If the tokens are not known (`unequal` is None), the longest sequences are compared.
    """
    if unequal is None:
        tokens, spread = abs(cell[1] + cell[3] - most), UNEQUAL if cell[3] == 0 and cell[0] > 0 else 0.0
    else:
        tokens, spread = abs(cell[1] - (most - unequal)), abs(cell[3] - unequal)
    batch, query = abs(cell[0] - call[0]), abs(cell[2] - call[2])
    if max(batch, tokens, query) > REACH + 1e-9:
        return math.inf
    # Another load is farther than the next measured workload: cells of one load lie at most a doubling apart.
    return batch + tokens + query + spread + 1.5 * abs(cell[4] - call[4])
