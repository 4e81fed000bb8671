"""The look-up of a launch for a call."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgen.spec import Workload, load_spec
from kvgen.spec.dispatch import Dispatch, Measured, prefers_sustained
from kvgen.spec.distance import mean_length
from kvgen.spec.traffic import parse
from kvgen.spec.waves import Waves
from tests.support.specs import base

DEFAULT = 9


def table(*names: str, sustained: bool = False) -> Dispatch:
    """Each workload has a launch of its own, numbered in order; the default is another one."""
    return Dispatch([Measured(parse(name), number) for number, name in enumerate(names)], DEFAULT, sustained=sustained)


def call(found: Dispatch, name: str) -> int:
    """The launch for a workload whose tokens the host knows."""
    work = parse(name)
    return found.launch(work.batch, work.kv_len, work.q_len, round(work.batch * mean_length(work)))


def test_the_nearest_measured_workload_decides():
    found = table("1x4096", "4x8192", "64x1024")
    assert [call(found, name) for name in ("1x4096", "1x6000", "4x8192", "3x9000", "100x700")] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("name", ["16x16384", "1x16384", "4x40000", "64x100", "1x4096q4", "1024x65536"])
def test_beyond_what_was_measured_the_default_serves_and_no_far_away_winner(name):
    assert call(table("1x4096", "4x8192", "64x1024"), name) == DEFAULT


def test_without_a_table_the_nearest_workload_serves_however_far():
    found = Dispatch([Measured(parse("1x4096"), 0), Measured(parse("64x1024"), 1)])
    assert found.launch(1024, 65536) == 1
    assert found.launch(1, 1 << 20) == 0


def three(*losses: tuple[float, float, float]) -> Dispatch:
    """16 sequences of 1K, 4K and 16K tokens, each with the losses of three launches."""
    names = ("16x1024", "16x4096", "16x16384")
    return Dispatch([Measured(parse(name), row.index(1), list(enumerate(row))) for name, row in zip(names, losses, strict=True)], DEFAULT)


def test_between_measured_workloads_the_launch_of_the_least_mean_loss_serves():
    """The launch that serves the nearest workload is bad at the other one; another launch loses little at both."""
    found = three((1, 1.4, 1.02), (1.3, 1, 1.02), (1.3, 1, 1.5))
    assert call(found, "16x2000") == 2
    assert [call(found, name) for name in ("16x1024", "16x4096", "16x16384")] == [0, 1, 1], "a measured workload keeps its launch"
    assert call(found, "16x1200") == 0, "near a measured workload, that one decides"
    assert call(found, "16x11000") == 1


def test_a_launch_that_was_not_measured_at_the_nearest_workload_does_not_serve():
    measured = [Measured(parse("16x1024"), 0), Measured(parse("16x4096"), 1, [(0, 5.0)]), Measured(parse("16x700"), 1, [(0, 5.0)])]
    assert call(Dispatch(measured, DEFAULT), "16x1100") == 0


def test_a_launch_that_loses_nothing_more_than_the_one_that_serves_does_not_replace_it():
    measured = [Measured(parse("16x1024"), 1, [(0, 1.0)]), Measured(parse("16x4096"), 1, [(0, 1.0)])]
    assert call(Dispatch(measured, DEFAULT), "16x2000") == 1


CLUSTERS = Waves(heads=8, resident=66, ctas_per_sm=1, step_tokens=256, tile_bytes=17408, most_waves=1)
"""Launch 0: clusters of two CTAs, whose splits run at once. 64 heads fill a wave, 88 heads take two."""
SPLITS = Waves(heads=8, resident=132, ctas_per_sm=1, step_tokens=128, tile_bytes=17408)
"""Launch 1: CTAs that are split until the last wave is full."""


def of_clusters_and_splits(*measured: Measured, known: bool = True) -> Dispatch:
    return Dispatch(measured, DEFAULT, waves={0: CLUSTERS, 1: SPLITS} if known else None)


def test_a_launch_whose_last_wave_is_mostly_empty_does_not_serve_a_call_of_equal_lengths():
    """At 8 sequences clusters are a little faster; with 11 sequences a quarter of them wait for a second wave."""
    eight = Measured(parse("8x131072"), 0, [(1, 1.03)])
    assert call(of_clusters_and_splits(eight, known=False), "11x131072") == 0
    found = of_clusters_and_splits(eight)
    assert [call(found, name) for name in ("8x131072", "8x100000", "11x131072")] == [0, 0, 1]


def test_what_a_partly_empty_wave_cost_at_a_measured_workload_does_not_count_elsewhere():
    """At 11 sequences clusters lose by their second wave alone."""
    eleven = Measured(parse("11x131072"), 1, [(0, 1.2)])
    assert call(of_clusters_and_splits(eleven, known=False), "8x131072") == 1
    assert call(of_clusters_and_splits(eleven), "8x131072") == 0


def test_where_no_launches_were_compared_full_waves_decide_among_those_that_serve_near_the_call():
    """At 11 sequences the clusters that serve 8 take two waves; the launch that serves 16 does not, and is nearly as near."""
    eight, sixteen, far = (Measured(parse(name), launch) for name, launch in (("8x131072", 0), ("16x131072", 1), ("512x4096", 1)))
    assert call(of_clusters_and_splits(eight, sixteen, known=False), "11x131072") == 0
    found = of_clusters_and_splits(eight, sixteen)
    assert [call(found, name) for name in ("8x131072", "11x131072", "16x131072")] == [0, 1, 1]
    assert found.launch(11, 131072, tokens=11 * 131072 - 1) == 0, "a plan balances unequal lengths"
    assert call(of_clusters_and_splits(eight, far), "11x131072") == 0, "what serves far away does not take part"


def test_a_plan_balances_unequal_lengths_so_waves_do_not_count():
    found = of_clusters_and_splits(Measured(parse("8x131072"), 0, [(1, 1.03)]))
    assert found.launch(11, 131072, tokens=11 * 131072) == 1
    assert found.launch(11, 131072, tokens=11 * 131072 - 1) == 0, "other lengths, though as many tokens when rounded"


def test_a_workload_of_unequal_lengths_keeps_its_launch_though_its_tokens_are_rounded():
    cells = [
        Measured(parse("64x300-20000"), 0, [(1, 1.02)]),
        Measured(parse("64x16384"), 1, [(0, 1.8)]),
        Measured(parse("64x4096"), 1, [(0, 1.8)]),
    ]
    assert call(Dispatch(cells, DEFAULT), "64x300-20000") == 0


def test_tokens_tell_equal_lengths_from_one_long_sequence_beside_short_ones():
    """64 sequences with one of 16K tokens: 1M tokens if all are as long, 130K if the others are short."""
    found = table("64x16384", "64x256-16384", "64x2048")
    assert found.launch(64, 16384, tokens=64 * 16384) == 0
    assert found.launch(64, 16384, tokens=64 * 3900) == 1
    assert found.launch(64, 16384, tokens=64 * 2048) == 1
    assert found.launch(64, 2500, tokens=64 * 2500) == 2


@pytest.mark.parametrize("batch", [7, 64])
def test_workloads_of_the_calls_kind_decide_before_nearer_ones_of_the_other(batch):
    """Unequal lengths have a plan, equal ones do not. Seven is no power of two: rounding its tokens says nothing of equality."""
    equal, unequal = Measured(parse(f"{batch}x2048"), 0, [(1, 1.5)]), Measured(parse(f"{batch}x256-16384"), 1, [(0, 1.5)])
    found = Dispatch([equal, unequal], DEFAULT)
    assert found.launch(batch, 2500, tokens=batch * 2500) == 0
    assert found.launch(batch, 2500, tokens=batch * 2500 - 1) == 1
    assert found.launch(batch, 2500, tokens=batch * 2500, equal=False) == 1, "equal lengths with a plan"
    assert found.launch(batch, 2500, tokens=batch * 2500 - 1, equal=True) == 0
    assert found.launch(batch, 2500) == 0, "16K tokens are far from 2500"
    assert found.launch(batch, 9000) == 1
    assert found.launch(batch, 2048, tokens=batch * 2048) == 0
    assert found.launch(batch, 2048, tokens=batch * 2048, equal=False) == 1, "not even that of the very workload"


def test_a_call_of_equal_lengths_follows_a_farther_workload_of_equal_lengths():
    far, close = Measured(parse("8x16384"), 0, [(1, 1.5)]), Measured(parse("16x2048-24576"), 1, [(0, 1.5)])
    found = Dispatch([far, close], DEFAULT)
    assert found.launch(16, 8192, tokens=16 * 8192) == 0
    assert found.cell(16, 8192, tokens=16 * 8192) == 0
    assert found.launch(16, 8193, tokens=16 * 8192) == 1
    assert found.cell(16, 8193, tokens=16 * 8192) == 1


def test_the_model_of_waves_counts_for_one_sequence_though_its_tokens_are_not_known():
    """Launch 0 has more heads than splits that run at once; between the two workloads its last wave is emptier than at them."""
    even = Waves(heads=8, resident=132, ctas_per_sm=1, step_tokens=128, tile_bytes=17408)
    cells = [Measured(parse(name), 0, [(1, 1.01)]) for name in ("1x1024", "1x4096")]
    found = Dispatch(cells, DEFAULT, waves={0: replace(even, resident=7, most_waves=1), 1: even})
    assert found.launch(1, 2324) == found.launch(1, 2324, tokens=2324) == 1
    assert Dispatch(cells, DEFAULT).launch(1, 2324) == 0


def test_where_nothing_of_the_calls_kind_is_near_the_other_decides():
    assert table("64x16384").launch(64, 16384, tokens=64 * 9000) == 0
    assert table("64x256-16384").launch(64, 3900, tokens=64 * 3900) == 0
    assert table("1x4096", "2x64-4096").launch(1, 4096) == 0, "one sequence has no plan"
    assert table("1x32768", "1x4096").launch(1, 32768, tokens=4096) == 1, "its tokens count where they are known, not their bound"


def test_where_the_host_knows_the_longest_alone_unequal_lengths_are_supposed():
    found = table("64x16384", "64x256-16384", "1x131072")
    assert found.launch(64, 16384) == 1
    assert table("64x16384").launch(64, 16384) == 0
    assert found.launch(1, 131072) == 2


def test_a_kernel_under_load_takes_what_was_measured_under_load():
    names = ("8x32768", "8x32768:sustained", "1x4096")
    assert call(table(*names), "8x32768") == 0
    assert call(table(*names, sustained=True), "8x32768") == 1
    assert call(table(*names, sustained=True), "8x20000") == 1
    assert call(table(*names, sustained=True), "1x4096") == 2


def test_the_load_of_a_spec_is_that_of_most_of_its_traffic():
    def spec(*works):
        return load_spec(base(workloads=[{"batch": batch, "kv_len": 64, "load": load, "weight": weight} for batch, load, weight in works]))

    assert not prefers_sustained(spec((1, "rested", 1.0)).workloads)
    assert not prefers_sustained(spec((1, "rested", 1.0), (2, "sustained", 1.0)).workloads)
    assert prefers_sustained(spec((1, "rested", 1.0), (2, "sustained", 1.5)).workloads)


def test_one_launch_needs_no_table():
    assert Dispatch.only().launch(7, 123, 4) == 0


@given(st.integers(1, 2000), st.integers(0, 1 << 21), st.integers(1, 8), st.none() | st.integers(0, 1 << 26))
def test_every_call_has_a_launch_and_the_same_one_again(batch, bound, q_len, tokens):
    found = table("1x4096", "4x8192", "64x256-16384", "8x32768:sustained", "1x4096q4")
    first = found.launch(batch, bound, q_len, tokens)
    assert first in (*range(5), DEFAULT)
    assert found.launch(batch, bound, q_len, tokens) == first
    cell = found.cell(batch, bound, q_len, tokens)
    assert first == (DEFAULT if cell is None else cell)


def test_a_growing_cache_asks_the_table_rarely():
    found = table("8x32768")
    for bound in range(30000, 34000):
        found.launch(8, bound, tokens=8 * bound)
    assert len(found._rounded) < 8


def test_threads_get_the_same_answers():
    found, calls = table("1x4096", "4x8192", "64x1024"), [(batch, length) for batch in (1, 4, 64) for length in range(500, 9000, 50)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: [found.launch(*one) for one in calls], range(4)))
    assert all(answer == answers[0] for answer in answers)


def test_it_needs_no_torch():
    subprocess.run([sys.executable, "-c", "import sys, kvgen.spec.dispatch; assert 'torch' not in sys.modules"], check=True)


def test_the_workload_alone_is_the_answer_to_its_own_name():
    work = Workload(batch=4, kv_len=8192)
    assert call(table("1x4096", work.key), work.key) == 1
