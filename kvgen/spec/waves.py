"""How evenly a launch fills a GPU where all sequences are equally long: the model by which the host chooses the number of splits.

A GPU runs a number of CTAs at a time, and each such set of CTAs is a *wave*. The last wave of a launch may be partly empty. A kernel
chooses its splits by this model in C++ (`templates/cuda/include/kvgen/schedule/split_model.cuh`, whose numbers are repeated here; those
of a variant are the back end's). The look-up of a launch needs it in Python, where no kernel is loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_WAVES = 8
WAVE_BYTES = 160 * 1024
"""Bytes that a multiprocessor could read while the CTAs of a wave start and end, with CUDA's kernels."""
REDUCE_BYTES = 3 * 1024
"""Bytes that a CTA could read while it reduces one more split."""
MOST_SPLITS = 256


@dataclass(frozen=True)
class Waves:
    """What the model needs to know of a launch on a GPU."""

    heads: int
    """Heads of a sequence: KV heads, times the CTAs that share the packed-GQA rows of a KV head for the query tokens of the spec."""
    resident: int
    """Splits that run at once: CTAs, or clusters."""
    ctas_per_sm: int
    step_tokens: int
    """Tokens that a split reads at a time: a KV tile of each of its CTAs."""
    tile_bytes: int
    """Bytes of a KV tile."""
    most_waves: int = MOST_WAVES
    """Waves for which the kernel splits heads; 1: it chooses no more splits than run at once. More heads than that take more waves."""
    visible: int | None = None
    """Tokens of a sequence that a query sees at most; None: all."""

    most_splits: int = MOST_SPLITS
    """Splits of a head at most."""
    wave_bytes: int = WAVE_BYTES
    """Bytes that a multiprocessor could read while the CTAs of a wave start and end."""

    @property
    def possible(self) -> bool:
        """Whether all numbers are those of some launch: a file may say otherwise."""
        return all(value is None or value >= 1 for value in vars(self).values())

    def unfilled(self, batch: int, length: int) -> float:
        """Logarithm of the modelled time of `batch` sequences of `length` tokens over that of one full wave that reads as many bytes: what
        a launch loses by partly empty waves, by the starts of further waves, and by reducing splits.
        """
        heads = batch * self.heads
        tokens = length if self.visible is None else min(length, self.visible)
        steps = max(1, tokens // self.step_tokens)
        counts = (self._splits(heads, steps, waves) for waves in range(1, self.most_waves + 1))
        least = min(self.cost(heads, steps, count) for count in counts)
        return math.log(least / (heads * steps / self.resident * self.tile_bytes + self._cta_wave_bytes))

    def _splits(self, heads: int, steps: int, waves: int) -> int:
        """Splits that fill so many waves, or fewer where reducing one more takes longer than the reading that it saves."""
        worthwhile = math.isqrt(waves * steps * self.tile_bytes // REDUCE_BYTES)
        return max(1, min(waves * self.resident // heads, worthwhile, steps, self.most_splits))

    def cost(self, heads: int, steps: int, splits: int) -> float:
        """Modelled time, in bytes that a CTA could read, of so many heads of `steps` steps with `splits` splits each."""
        waves = -(-heads * splits // self.resident)
        return waves * (-(-steps // splits) * self.tile_bytes + self._cta_wave_bytes) + splits * REDUCE_BYTES

    @property
    def _cta_wave_bytes(self) -> int:
        return self.wave_bytes // self.ctas_per_sm
