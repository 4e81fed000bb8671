"""Which launch of a kernel serves a call: the one look-up of `Kernel`, the torch operators and exports.

A table of measured workloads decides, if the kernel has one. A call of a measured workload takes the launch that serves it. Between the
measured workloads, each launch has at each of them a loss, which is its time over that of the launch that serves there, and the launch of
the least mean loss serves: an inverse distance weighting (Shepard, "A two-dimensional interpolation function for irregularly-spaced data",
1968). Unequal lengths have a plan, equal ones do not, and a launch that is fast with one may be slow with the other; so workloads of the
call's kind decide, and others only where none of that kind is near. Where all lengths are equal, a part of a loss comes from a last wave of
CTAs that is partly empty. It changes from one batch to the next, so for a call of equal lengths the model of waves (`kvgen.spec.waves`)
takes it off the losses of the measured workloads, and adds what it is for the call. Where no measured workload is near, the plain schedule
serves. Where no times of launches were compared, the workloads of the grid have defaults, and those for which the entry was tuned their
launches. The nearest one decides about unequal lengths. About equal ones the model of waves and the distance decide between the launches
that serve near the call. Without a table, the launch that was tuned for the nearest workload serves, however far away that is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from kvgen.spec.distance import Coordinates, coordinates, coordinates_of, mean_length, nearest

if TYPE_CHECKING:
    from kvgen.spec.model import Workload
    from kvgen.spec.operations import AnyWorkload
    from kvgen.spec.waves import Waves

REACH = 1.0
"""Doublings of batch, of tokens and of q_len, each, up to which a measured workload is near a call."""
POWER = 4
"""A measured workload has the weight distance^-POWER: the nearest ones outweigh all others together."""
CLOSEST = 1 / 64
"""The least distance that counts: tokens are rounded, so a measured workload may seem to be where the call is."""
STEPS = 8
"""Steps per doubling to which the tokens of a call are rounded, so that a growing cache rarely asks anew."""
UNFILLED = 0.6
"""Part of the loss which the model of waves predicts that shows in measured times: where a wave is partly empty, its CTAs read faster than
the model says (docs/decisions/0035; 0044 has the number).
"""
GUESSED = 0.1
"""Loss of a launch that was compared with no other, for each doubling between the call and the nearest workload that it serves. Any number
from .02 to .3 chooses equally well at 132 calls between the workloads of the grid (docs/decisions/0048).
"""
REMEMBERED = 4096


class Measured(NamedTuple):
    """A workload, and what is known of the launches there."""

    workload: Workload
    launch: int
    """Index of the launch that serves it."""
    losses: Sequence[tuple[int, float]] = ()
    """Of the other launches that were measured: index, and time over that of the launch that serves, 1 at least."""


class Dispatch:
    """Maps what the host knows of a call to the index of a launch. Thread-safe; without torch."""

    def __init__(
        self,
        measured: Sequence[Measured],
        default: int | None = None,
        *,
        sustained: bool = False,
        waves: Mapping[int, Waves] | None = None,
    ) -> None:
        """`default` is the launch far from all that was measured, which is the plain schedule; None: the launch of the nearest workload
        serves, however far. `sustained`: prefer what was measured under a sustained load. `waves` says how launches fill the
        GPU, by their index.
        """
        self._cells = [coordinates_of(one.workload) for one in measured]
        self._workloads = [one.workload for one in measured]
        self._launches = [one.launch for one in measured]
        self._compared = any(one.losses for one in measured)
        self._losses = [{one.launch: 0.0} | {index: math.log(loss) for index, loss in one.losses} for one in measured]
        self._exact = {_call_of(one.workload): one.launch for one in sorted(measured, key=lambda one: _prefers(one.workload, sustained))}
        self._default = default
        self._sustained = sustained
        self._waves = waves or {}
        self._known: dict[tuple[int, int, int, int | None, bool | None], int] = {}
        """By call."""
        self._rounded: dict[tuple[int, int, int, int | None, bool], int] = {}
        """By call, its tokens in steps, and whether its lengths are equal."""

    @classmethod
    def only(cls) -> Dispatch:
        """The look-up of a kernel with one launch."""
        return cls([], 0)

    def launch(self, batch: int, bound: int, q_len: int = 1, tokens: int | None = None, *, equal: bool | None = None) -> int:
        """Index of the launch for `batch` sequences, the longest of `bound` tokens at most, with `q_len` query tokens each.

        `tokens` is the number of all sequences together: batch x bound where all are equal, None where the host does not know it. `equal`:
        whether the call is of the kind of equal lengths, which have no plan; by default if `tokens` says that they are equal. One sequence
        is of that kind in any case.
        """
        call = (batch, bound, q_len, tokens, equal)
        found = self._known.get(call)
        if found is None:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            bound, tokens, of_equal = _lengths(batch, bound, tokens, equal)
            found = self._known[call] = self._find(batch, bound, q_len, tokens, equal=of_equal)
        return found

    def _find(self, batch: int, bound: int, q_len: int, tokens: int | None, *, equal: bool) -> int:
        if self._default is None:
            return self._launches[nearest(self._cells, coordinates(batch, bound, q_len, tokens, sustained=self._sustained))]
        exact = self._exact.get((batch, bound, q_len, tokens))
        if exact is not None and equal == (tokens == batch * bound):
            return exact
        call = (batch, _step(bound), q_len, None if tokens is None else _step(tokens), equal)
        found = self._rounded.get(call)
        if found is None:
            if len(self._rounded) >= REMEMBERED:
                self._rounded.clear()
            away = self._away(batch, bound, q_len, tokens, equal=equal)
            closest = self._near(away)
            shape = (batch, round(_rounded(bound))) if equal else None
            found = self._rounded[call] = self._default if closest is None else self._best(away, closest, shape)
        return found

    def _best(self, away: Sequence[tuple[float, bool]], closest: int, shape: tuple[int, int] | None) -> int:
        """The launch for a call with workloads near it. `shape`: batch and length of a call of equal lengths; None where they differ, since
        a plan balances those.
        """
        return self._least_loss(away, closest, shape) if self._compared else self._least_guess(away, shape)

    def cell(self, batch: int, bound: int, q_len: int = 1, tokens: int | None = None) -> int | None:
        """Index of the measured workload nearest to such a call; None where none is within REACH, and the plain schedule serves."""
        bound, tokens, equal = _lengths(batch, bound, tokens)
        return self._near(self._away(batch, bound, q_len, tokens, equal=equal))

    def _away(self, batch: int, bound: int, q_len: int, tokens: int | None, *, equal: bool) -> list[tuple[float, bool]]:
        """`_distances`, where workloads of unequal lengths are infinitely far from a call of equal lengths if one of equal lengths is near,
        and the other way round.
        """
        away = self._distances(batch, bound, q_len, tokens)
        of_kind = [(cell[3] == 0) == equal for cell in self._cells]
        if any(near and same for (_, near), same in zip(away, of_kind, strict=True)):
            away = [one if same else (math.inf, False) for one, same in zip(away, of_kind, strict=True)]
        return away

    def _distances(self, batch: int, bound: int, q_len: int, tokens: int | None) -> list[tuple[float, bool]]:
        """Distance of each measured workload from a call, and whether it is near."""
        call = coordinates(batch, 1, q_len, sustained=self._sustained)
        most = call[0] + math.log2(_rounded(bound))
        unequal = None if tokens is None else 0.0 if tokens == batch * bound else max(0.0, most - math.log2(_rounded(tokens)))
        return [_away(cell, call, most, unequal) for cell in self._cells]

    @staticmethod
    def _near(away: Sequence[tuple[float, bool]]) -> int | None:
        """The nearest of the measured workloads that are near; the first of equals."""
        closest = min((distance for distance, near in away if near), default=math.inf)
        return away.index((closest, True)) if math.isfinite(closest) else None

    @cached_property
    def _losses_of_full_waves(self) -> list[dict[int, float]]:
        """Of the measured workloads with equal lengths, the losses without what partly empty waves have of them; of others, the losses."""
        return [
            losses if work.shortest < work.kv_len else self._if_waves_were_full(losses, launch, (work.batch, work.kv_len))
            for work, launch, losses in zip(self._workloads, self._launches, self._losses, strict=True)
        ]

    def _if_waves_were_full(self, losses: Mapping[int, float], serving: int, shape: tuple[int, int]) -> dict[int, float]:
        served = self._unfilled(serving, shape)
        return {launch: loss - self._unfilled(launch, shape) + served for launch, loss in losses.items()}

    def _unfilled(self, launch: int, shape: tuple[int, int]) -> float:
        """Logarithm of what a launch loses in a partly empty wave with so many sequences of one length; 0 where that is not known."""
        waves = self._waves.get(launch)
        return UNFILLED * waves.unfilled(*shape) if waves else 0.0

    def _least_loss(self, away: Sequence[tuple[float, bool]], closest: int, shape: tuple[int, int] | None) -> int:
        """The launch of the least mean loss, of those that were measured at the nearest workload: they can serve the call. Of equals, the
        one that serves there.
        """
        of_cells = self._losses if shape is None else self._losses_of_full_waves
        weights = [max(distance, CLOSEST) ** -POWER for distance, _ in away]

        def mean(launch: int) -> float:
            known = [(weight, losses[launch]) for weight, losses in zip(weights, of_cells, strict=True) if launch in losses]
            expected: float = sum(weight * loss for weight, loss in known) / sum(weight for weight, _ in known)
            return expected if shape is None else expected + self._unfilled(launch, shape)

        return min(self._losses[closest], key=mean)

    def _least_guess(self, away: Sequence[tuple[float, bool]], shape: tuple[int, int] | None) -> int:
        """The launch of the least guessed loss, of those that serve near the call; of equals, the nearest one."""
        distances: dict[int, float] = {}
        for distance, number in sorted((distance, number) for number, (distance, near) in enumerate(away) if near):
            distances.setdefault(self._launches[number], distance)

        def guess(launch: int) -> float:
            return GUESSED * distances[launch] + (0.0 if shape is None else self._unfilled(launch, shape))

        return min(distances, key=guess)


def prefers_sustained(workloads: Sequence[AnyWorkload]) -> bool:
    """Whether most of the traffic, by weight, is under a sustained load. Shapes of matrices say nothing of it."""
    sustained = sum(work.weight for work in workloads if getattr(work, "load", "rested") == "sustained")
    return 2 * sustained > sum(work.weight for work in workloads)


def _lengths(batch: int, bound: int, tokens: int | None, equal: bool | None = None) -> tuple[int, int | None, bool]:
    """Bound and tokens of a call, and whether it is of the kind of equal lengths. The bound of one sequence is its number of tokens."""
    if batch == 1:
        length = bound if tokens is None else min(bound, tokens)
        return length, length, True
    return bound, tokens, tokens == batch * bound if equal is None else equal


def _call_of(workload: Workload) -> tuple[int, int, int, int | None]:
    """A call of exactly this workload."""
    return workload.batch, workload.kv_len, workload.q_len, round(workload.batch * mean_length(workload))


def _prefers(workload: Workload, sustained: bool) -> bool:
    """Whether a workload is under the load that the kernel is for: of two with the same calls this one decides."""
    return (workload.load == "sustained") == sustained


def _step(tokens: int) -> int:
    return round(STEPS * math.log2(max(1, tokens)))


def _rounded(tokens: int) -> float:
    return math.pow(2, _step(tokens) / STEPS)


def _away(cell: Coordinates, call: Coordinates, most: float, unequal: float | None) -> tuple[float, bool]:
    """Distance of a measured workload from a call of 2^most tokens at most, 2^(most - unequal) in fact, and whether it is within REACH.

    If the tokens are not known (`unequal` is None), the longest sequences are compared.
    """
    if unequal is None:
        tokens, spread = abs(cell[1] + cell[3] - most), 0.0
    else:
        tokens, spread = abs(cell[1] - (most - unequal)), abs(cell[3] - unequal)
    batch, query = abs(cell[0] - call[0]), abs(cell[2] - call[2])
    # Another load counts as one and a half doublings: the workloads of a whole grid lie a doubling apart.
    distance = batch + tokens + query + spread + 1.5 * abs(cell[4] - call[4])
    return distance, max(batch, tokens, query) <= REACH + 1e-9
