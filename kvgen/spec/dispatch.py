"""Which launch of a kernel serves a call: the one whose modelled time is the least.

CTAs read memory at the same rate, so the busiest CTA decides how long a call takes. The modelled time in µs is

    start + tile · KV tiles of the busiest CTA + wave · waves + split · splits + reduction, if a head has several splits

Sequences of equal lengths get the same number of splits, which run in *waves* of as many CTAs as the GPU holds. Sequences of unequal
lengths have a plan, which gives every CTA as many KV tiles. The constants are nominal: fitted to the times of 43 launches at 1,500
batches and lengths on an H100 and on H200s. A call of a workload that the kernel was tuned for takes the launch that won there, and of
launches whose modelled times differ by less than the model errs, the one tuned for the nearest workload serves. Exported kernels copy
this module, so it imports nothing of kvgen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MOST_WAVES = 8
WAVE_BYTES = 160 * 1024
"""Bytes that a multiprocessor could read while the CTAs of a wave start and end, by which a kernel chooses its splits
(`templates/cuda/include/kvgen/host/launch.cuh`).
"""
REDUCE_BYTES = 3 * 1024
"""Bytes that a CTA could read while it reduces one more split, likewise."""
MOST_SPLITS = 256
STEPS = 8
"""Steps per doubling to which the tokens of a call are rounded, so that a growing cache rarely asks anew."""
REMEMBERED = 4096
TIED = 1.005
"""Modelled times within this factor do not say which launch is faster."""
UNKNOWN = 0.5
"""Mean over longest length, where the host knows the longest alone."""


class Constants(NamedTuple):
    """Nominal times in µs; `tile` is a factor of the time in which a CTA reads a KV tile."""

    start: float
    tile: float
    wave: float
    split: float = 0.0
    reduction: float = 0.0


EQUAL = Constants(start=1.06, tile=0.98, wave=2.41, split=0.06, reduction=1.02)
UNEQUAL = Constants(start=7.22, tile=1.18, wave=0.22)
"""With a plan, the waves are the starts of further sequences in one CTA."""


@dataclass(frozen=True)
class Tiling:
    """How a launch divides calls among the CTAs of a GPU."""

    heads: int
    """Heads of a sequence: KV heads, times the CTAs that share the packed-GQA rows of a KV head."""
    resident: int
    """Splits that run at once: CTAs, or clusters."""
    ctas_per_sm: int
    step_tokens: int
    """Tokens that a split reads at a time: a KV tile of each of its CTAs."""
    tile_bytes: int
    """Bytes of a KV tile."""
    tile_us: float
    """µs in which a CTA reads a KV tile, with all others reading."""
    most_waves: int = MOST_WAVES
    """Waves for which the kernel splits heads; 1: no more splits than run at once. More heads than that take more waves."""
    visible: int | None = None
    """Tokens of a sequence that a query sees at most; None: all."""
    most_splits: int = MOST_SPLITS
    """Splits of a head at most."""
    wave_bytes: int = WAVE_BYTES

    def us(self, batch: int, tokens: float, *, equal: bool) -> float:
        """Modelled time of `batch` sequences of `tokens` tokens each, which is their mean where they are unequal."""
        heads, visible = batch * self.heads, tokens if self.visible is None else min(tokens, self.visible)
        if equal:
            steps = max(1, math.ceil(visible / self.step_tokens))
            splits = self.splits(heads, steps)
            waves = -(-heads * splits // self.resident)
            tiles = waves * -(-steps // splits)
            model = EQUAL
        else:
            splits, waves = 1, -(-heads // self.resident)
            tiles = math.ceil(heads * visible / self.step_tokens / self.resident)
            model = UNEQUAL
        reduction = model.reduction if splits > 1 else 0.0
        return model.start + model.tile * tiles * self.tile_us + model.wave * waves + model.split * splits + reduction

    def splits(self, heads: int, steps: int) -> int:
        """The splits that the kernel chooses for each of so many heads of equal lengths of `steps` steps."""
        counts = (self._filling(heads, steps, waves) for waves in range(1, self.most_waves + 1))
        return min(counts, key=lambda splits: self.cost(heads, steps, splits))

    def cost(self, heads: int, steps: int, splits: int) -> float:
        """What the kernel's choice of splits weighs: the bytes that a CTA could read in the time of so many splits of each head."""
        waves = -(-heads * splits // self.resident)
        return waves * (-(-steps // splits) * self.tile_bytes + self.wave_bytes // self.ctas_per_sm) + splits * REDUCE_BYTES

    def _filling(self, heads: int, steps: int, waves: int) -> int:
        """Splits that fill so many waves, or fewer where reducing one more takes longer than the reading that it saves."""
        worthwhile = math.isqrt(waves * steps * self.tile_bytes // REDUCE_BYTES)
        return max(1, min(waves * self.resident // heads, worthwhile, steps, self.most_splits))


ALIKE = Tiling(heads=1, resident=1, ctas_per_sm=1, step_tokens=1, tile_bytes=1, tile_us=0.0)
"""Of launches of which nothing is known."""


class Call(NamedTuple):
    """A call as the host knows it; `tokens` is the number of all sequences together."""

    batch: int
    longest: int
    q_len: int
    tokens: int


class Dispatch:
    """Maps what the host knows of a call to the index of a launch. Thread-safe; without torch."""

    def __init__(self, launches: Sequence[Tiling], tuned: Sequence[tuple[Call, int]] = ()) -> None:
        """`launches`: none for a kernel of one. `tuned`: the workloads that launches won at, with their indices. Of two for the same call
        the last one counts.
        """
        self.launches = tuple(launches)
        self.tuned = dict(tuned)
        self._known: dict[tuple[int, int, int, int | None, bool | None], int] = {}

    def launch(self, batch: int, bound: int, q_len: int = 1, tokens: int | None = None, *, equal: bool | None = None) -> int:
        """Index of the launch for `batch` sequences, the longest of `bound` tokens at most, with `q_len` query tokens each.

        `tokens` is the number of all sequences together: batch x bound where all are equal, None where the host does not know it.
        `equal`: whether the call has no plan; by default if `tokens` says that all lengths are equal. One sequence has none in any case.
        """
        call = (batch, bound, q_len, tokens, equal)
        found = self._known.get(call)
        if found is None:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            found = self._known[call] = self._find(batch, bound, q_len, tokens, equal)
        return found

    def times(self, batch: int, bound: int, tokens: int | None = None, *, equal: bool | None = None) -> list[float]:
        """Modelled times in µs of all launches; arguments as in `launch`."""
        if batch == 1:
            bound, equal = bound if tokens is None else min(bound, tokens), True
        elif equal is None:
            equal = tokens == batch * bound
        mean = bound if equal else bound * UNKNOWN if tokens is None else tokens / batch
        mean = 2 ** (round(STEPS * math.log2(max(1, mean))) / STEPS)
        return [launch.us(batch, mean, equal=equal) for launch in self.launches]

    def _find(self, batch: int, bound: int, q_len: int, tokens: int | None, equal: bool | None) -> int:
        if len(self.launches) < 2:
            return 0
        total = batch * bound if tokens is None else tokens
        call = Call(batch, bound, q_len, total)
        if tokens is not None and equal in (None, tokens == batch * bound) and call in self.tuned:
            return self.tuned[call]
        times = self.times(batch, bound, tokens, equal=equal)
        tied = [index for index, us in enumerate(times) if us <= TIED * min(times)]
        near = min((one for one in self.tuned.items() if one[1] in tied), key=lambda one: _apart(one[0], call), default=None)
        return tied[0] if near is None else near[1]


def _apart(one: Call, other: Call) -> float:
    """Doublings of batch, of all tokens and of query tokens between two calls."""
    pairs = ((one.batch, other.batch), (one.tokens, other.tokens), (one.q_len, other.q_len))
    return sum(abs(math.log2(max(1, a) / max(1, b))) for a, b in pairs)
