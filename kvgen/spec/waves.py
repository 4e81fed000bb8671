"""How evenly a launch fills a GPU where all sequences are equally long: the model by which the host chooses the number of splits.

A GPU runs a number of CTAs at a time, and each such set of CTAs is a *wave*. The last wave of a launch may be partly empty. A kernel
chooses its splits by this model in C++ (`templates/cuda/include/kvgen/schedule/split_model.cuh`, whose numbers are repeated here). The
look-up of a launch needs it in Python, where no kernel is loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_WAVES = 8
WAVE_BYTES = 160 * 1024
"""Which a multiprocessor could read while the CTAs of a wave start and end."""
REDUCE_BYTES = 3 * 1024
"""Which a CTA could read while it reduces one more split."""
MOST_SPLITS = 256


@dataclass(frozen=True)
class Waves:
    """What the model needs to know of a launch on a GPU."""

    heads: int
    """Heads of a sequence: KV heads, times the CTAs that share the packed-GQA rows of a KV head."""
    resident: int
    """Splits that run at once: CTAs, or clusters."""
    ctas_per_sm: int
    step_tokens: int
    """Tokens that a split reads at a time: a KV tile of each of its CTAs."""
    tile_bytes: int
    """Bytes of a KV tile."""
    most_waves: int = MOST_WAVES
    visible: int | None = None
    """Tokens of a sequence that a query sees at most; None: all."""

    def unfilled(self, batch: int, length: int) -> float:
        """Logarithm of the modelled time of `batch` sequences of `length` tokens over that of a launch whose waves are all full."""
        heads = batch * self.heads
        tokens = length if self.visible is None else min(length, self.visible)
        steps = max(1, tokens // self.step_tokens)
        start = WAVE_BYTES / self.ctas_per_sm
        fullest = (waves * self.resident // heads for waves in range(1, self.most_waves + 1))
        counts = {min(max(1, count), steps, MOST_SPLITS) for count in fullest}
        least = min(
            -(-heads * count // self.resident) * (-(-steps // count) * self.tile_bytes + start) + count * REDUCE_BYTES for count in counts
        )
        return math.log(least / (heads * steps / self.resident * self.tile_bytes + start))
