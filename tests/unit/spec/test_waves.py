"""The model of how evenly a launch fills a GPU. `tests/unit/lower_cuda/test_split_model.py` compares it with that of the kernels."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvgen.spec.waves import Waves

ALL_SPLITS = Waves(heads=8, resident=132, ctas_per_sm=1, step_tokens=128, tile_bytes=17408)
CLUSTERS = Waves(heads=8, resident=66, ctas_per_sm=1, step_tokens=256, tile_bytes=17408, most_waves=1)
"""Clusters of two CTAs, whose splits run at once."""


def lost(waves: Waves, batch: int, length: int) -> float:
    """Modelled time over that of full waves."""
    return math.exp(waves.unfilled(batch, length))


def test_a_wave_that_is_nearly_full_loses_little():
    assert 1 <= lost(CLUSTERS, 8, 32768) < 1.1  # 64 of 66 clusters
    assert 1 <= lost(ALL_SPLITS, 8, 32768) < 1.1  # 128 of 132 CTAs


def test_clusters_of_more_heads_than_run_at_once_have_a_last_wave_of_few():
    assert lost(CLUSTERS, 11, 131072) == pytest.approx(1.5, abs=0.05)  # 88 heads: two waves of 66
    assert lost(ALL_SPLITS, 11, 131072) < 1.05, "more splits fill the last wave"


def test_a_launch_of_few_splits_leaves_a_gpu_empty():
    few = replace(ALL_SPLITS, most_splits=8)
    assert lost(ALL_SPLITS, 1, 32768) < 1.2 < lost(few, 1, 32768)  # 8 heads of 8 splits on 132 multiprocessors


def test_short_heads_cannot_fill_a_wave_by_more_splits():
    assert lost(ALL_SPLITS, 17, 512) > 1.4  # 136 heads of four tiles


def test_with_a_window_the_tokens_before_it_do_not_count():
    window = Waves(heads=8, resident=132, ctas_per_sm=1, step_tokens=128, tile_bytes=17408, visible=1152)
    assert lost(window, 17, 65536) == lost(ALL_SPLITS, 17, 1152) > lost(ALL_SPLITS, 17, 65536)


@pytest.mark.parametrize("length", [0, 1, 127, 128, 1 << 20])
def test_every_length_has_a_loss_that_is_finite(length):
    assert all(math.isfinite(waves.unfilled(batch, length)) for waves in (ALL_SPLITS, CLUSTERS) for batch in (1, 1000))
