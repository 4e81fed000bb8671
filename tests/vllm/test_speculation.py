"""Drafts of n-grams: what is rejected is taken back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvgen.errors import UnsupportedError
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


def test_drafts_of_a_model(engine: Engines, model: Path, watched: Watched) -> None:
    """The model itself drafts what it says, over pages of kvgen's: any fault of a draft's attention is a draft that is rejected."""
    drafts = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3, "attention_backend": "CUSTOM"}
    llm = engine(model, SAW, speculative_config=drafts)
    found, _ = generate(llm, PROMPTS, 40)
    assert counted(llm, "spec_decode_num_accepted_tokens") == counted(llm, "spec_decode_num_draft_tokens") > 100
    del llm
    same(found, generate(engine(model, SAW), PROMPTS, 40)[0], limit=1e-3)
    with pytest.raises(UnsupportedError, match="speculative decoding by draft_model"):
        engine(model, INT4, speculative_config=drafts)
