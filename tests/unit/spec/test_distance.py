"""How far workloads are apart."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given

from kvgen.spec import Workload, load_spec
from kvgen.spec.workloads import apart, apart_across_formats, coordinates, coordinates_of, distance, nearest
from tests.support.specs import workloads

INT4, INT8 = ({"bits": bits, "axis": "token", "group": 64} for bits in (4, 8))


def work(batch: int, kv_len: int, q_len: int = 1) -> Workload:
    return Workload(batch=batch, kv_len=kv_len, q_len=q_len)


def test_doublings_of_batch_of_all_tokens_and_of_query_tokens_add_up() -> None:
    assert distance(work(1, 4096), work(1, 4096)) == 0
    assert distance(work(1, 4096), work(2, 4096)) == 2
    assert distance(work(1, 4096), work(4, 1024)) == 2
    assert distance(work(1, 4096), work(1, 1024)) == 2
    assert distance(work(1, 4096), work(1, 4096, 8)) == 3
    assert distance(work(64, 1024), work(32, 8192)) == 3
    assert distance(work(64, 1024), work(1, 4096)) == 10


@given(workloads(), workloads(), workloads())
def test_it_is_a_metric(one: Workload, two: Workload, three: Workload) -> None:
    assert distance(one, two) == distance(two, one)
    assert (distance(one, two) == 0) == (one.key == two.key)
    assert distance(one, three) <= distance(one, two) + distance(two, three) + 1e-9


def test_the_first_of_equals_is_nearest_and_there_must_be_one() -> None:
    tuned = [coordinates_of(work(*shape)) for shape in ((1, 4096), (1, 32768), (32, 8192), (32, 8192))]
    assert nearest(tuned, coordinates(16, 16384, 1)) == 2
    with pytest.raises(ValueError, match="empty"):
        nearest([], coordinates(1, 1, 1))


def test_an_empty_cache_counts_as_one_token() -> None:
    assert apart(coordinates(4, 0, 0), coordinates(4, 1, 1)) == 0


def test_across_formats_heads_are_sequences_and_bits_of_a_token_count() -> None:
    int4, int8, int8_mqa = (
        load_spec({"attention": {"q_heads": 8, "kv_heads": heads, "head_dim": 64}, "key": quant, "value": quant})
        for heads, quant in ((2, INT4), (2, INT8), (1, INT8))
    )
    one = work(1, 4096)
    assert apart_across_formats(int4, one, int4, one) == 0
    assert apart_across_formats(int4, one, int8, one) == apart_across_formats(int8, one, int4, one) == 1
    assert apart_across_formats(int8, one, int8_mqa, work(2, 4096)) == 1  # twice the query heads share a KV head


def test_importing_it_loads_no_torch() -> None:
    subprocess.run([sys.executable, "-c", "import sys, kvgen.spec.workloads; assert 'torch' not in sys.modules"], check=True)
