"""Requests that arrive while others run, and are aborted, beside the same ones by themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import write_model
from tests.vllm.engines import ARRIVAL, INT4, PLAIN, Engines, Watched, alike, counted, one_by_one, requests, row_by_row, together

ASKED = requests(200 if os.environ.get("KVGEN_VLLM_ALL") else 60)
FEW = {"max_num_batched_tokens": 48, "max_num_seqs": 8}
"""Chunks of up to 48 tokens beside decode steps."""
ROOM = 800
"""Tokens in pages, too few for eight requests."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One KV head: a head that is split over workers, in a large step, has other bits than in a step of its own."""
    return write_model(tmp_path_factory.mktemp("small"), num_attention_heads=2, num_key_value_heads=1)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with row_by_row():
        yield


@pytest.mark.parametrize("form", [PLAIN, INT4, *ARRIVAL.values()], ids=["16", "int4-residual", *ARRIVAL])
def test_requests_that_come_and_go(engine: Engines, small: Path, form: Any, watched: Watched) -> None:
    """Chunks of any remainder, prompts that hit pages, preemption and parallel sampling. Tokens that are quantized as they arrive give
    the bits of requests one by one, in whole prompts, without pages of others. In each format the attention of every row is that of the
    reference.
    """
    page = 32 if form in ARRIVAL.values() else 64
    llm = engine(small, form, **FEW, block_size=page, num_gpu_blocks_override=ROOM // page)
    watched.every = 3
    found = together(llm, ASKED)
    assert counted(llm, "num_preemptions") > 3
    assert counted(llm, "prefix_cache_hits") > 1000
    assert watched.rows["cached"] > 300
    if form in ARRIVAL.values():
        assert watched.rows["exact"] == 0
        alike(found, one_by_one(engine(small, form, enable_prefix_caching=False), ASKED), ASKED)
