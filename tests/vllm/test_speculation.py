"""Drafts of n-grams: what is rejected is taken back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import INT4, PLAIN, SAW, Engines, Watched, counted, generate, ids, same

PROMPTS = [(ids(n, 9) * 40)[:length] for n, length in enumerate((30, 121, 126, 250))]
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@pytest.mark.parametrize("form", [PLAIN, SAW, INT4], ids=["16", "saw", "int4"])
def test_tokens_are_those_without_drafts(engine: Engines, model: Path, form: Any, watched: Watched) -> None:
    """With 16 bits, and where a query sees all tokens quantized; else a block is packed before a query that it would follow."""
    llm = engine(model, form, speculative_config=DRAFTS)
    watched.every = 2
    found, _ = generate(llm, PROMPTS, 60)
    drafts, accepted = (counted(llm, f"spec_decode_num_{name}_tokens") for name in ("draft", "accepted"))
    assert 20 < accepted < drafts - 20
    if form is not INT4:
        same(found, generate(engine(model, form), PROMPTS, 60)[0], limit=1e-3)
