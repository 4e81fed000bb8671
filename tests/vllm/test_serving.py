"""kvgen's backend beside vLLM's own: tokens and log-probabilities, attention beside fp64, prefix caching, chunks, preemption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.v1.attention.backend import AttentionBackend

from tests.vllm.conftest import write_model
from tests.vllm.engines import INT4, INT8, PLAIN, SAW, UNQUANTIZED, Engines, Found, Watched, counted, generate, ids, same

PROMPTS = [ids(n, n) for n in (5, 120, 257, 300)]


@pytest.fixture(scope="module")
def stock(engine: Engines, model: Path) -> Found:
    return generate(engine(model, None), PROMPTS)[0]


@pytest.mark.parametrize("form", [PLAIN, INT4, SAW], ids=["16", "int4", "saw"])
def test_prompts_of_one_batch_and_again_from_the_prefix_cache(
    engine: Engines, model: Path, stock: Found, form: Any, watched: Watched
) -> None:
    """With 16 bits tokens are those of vLLM's own backend. Prompts that hit pages, also those of the same step, give the same bits."""
    llm = engine(model, form)
    first, hits = generate(llm, PROMPTS)
    assert hits == [0, 0, 0, 0]
    if form is PLAIN:
        same(first, stock, limit=1e-4)
    if form is not SAW:
        assert first[0][0] == stock[0][0], "a prompt that is no longer than the residual is exact in any format"
    assert watched.rows["exact"] == (0 if form is SAW else 2 * len(PROMPTS))
    again, hits = generate(llm, PROMPTS)
    assert hits == [0, 0, 256, 256]
    if form is not INT4:
        same(again, first, limit=1e-4)
    shared = ids(7, 300)
    pair = [shared, shared[:270] + ids(8, 30)]
    both, hits = generate(llm, pair, 4)
    assert hits == [0, 256], "the second hits pages that the first fills in the same step"
    second, hits = generate(llm, pair[1:], 4)
    assert hits == [256]
    same(second, (both[0][1:], both[1][1:]), limit=1e-4)


@pytest.mark.parametrize("form", [PLAIN, INT8, UNQUANTIZED, SAW], ids=["16", "int8", "unquantized", "saw"])
def test_chunks_and_preemption(engine: Engines, model: Path, form: Any, watched: Watched) -> None:
    """Chunks of 48 tokens beside decode steps, and pages for only some of the requests."""
    many = [ids(100 + n, n) for n in (250, 120, 110, 100, 125, 90)]
    few = {"max_num_batched_tokens": 48, "num_gpu_blocks_override": 9, "enable_prefix_caching": form is not UNQUANTIZED}
    llm = engine(model, form, **few)
    found, _ = generate(llm, many, 50)
    assert counted(llm, "num_preemptions") > 0
    assert watched.rows["cached"] > 500
    del llm
    if form is PLAIN:
        same(found, generate(engine(model, None), many, 50)[0], limit=1e-3)
    if form is SAW:  # as if there were room, and no chunks
        same(found, generate(engine(model, form, block_size=32), many, 50)[0], limit=1e-3)


@pytest.mark.skipif(not hasattr(AttentionBackend, "customize_spec"), reason="vLLM 0.26 sizes no pages of sliding windows")
def test_a_sliding_window(engine: Engines, tmp_path_factory: pytest.TempPathFactory, watched: Watched) -> None:
    """A Mistral, whose pages before the window vLLM takes back."""
    mistral = write_model(
        tmp_path_factory.mktemp("mistral"), architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=100
    )
    how = {"max_num_batched_tokens": 64}
    found, _ = generate(engine(mistral, PLAIN, **how), PROMPTS)
    same(found, generate(engine(mistral, None, **how), PROMPTS)[0], limit=1e-3)
    assert watched.rows["cached"] > 0
