"""Other models than Llama: windows, soft caps, learned sinks, norms of queries and keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm.conftest import VOCABULARY
from tests.vllm.engines import INT4, SAW, Engines, Watched, generate, ids, same

SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 1024, "initializer_range": 0.2, "dtype": "float32",
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
WINDOWS = {"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma2": {**WINDOWS, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 64},
    "gpt_oss": {**WINDOWS, "num_local_experts": 2, "num_experts_per_tok": 1},
}
PROMPTS = [ids(n, n) for n in (5, 120, 300)]
CHUNKS = {"max_num_batched_tokens": 64}


@pytest.fixture(scope="module", params=MODELS)
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of random weights, as transformers makes it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(request.param, **SHAPE, **MODELS[request.param]))
    for name, weight in made.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(weight, std=3.0)
    folder = tmp_path_factory.mktemp(request.param)
    made.save_pretrained(folder)
    return folder


def test_a_model_is_as_over_vllms_own_backend(engine: Engines, other: Path, watched: Watched) -> None:
    found, _ = generate(engine(other, {"key": {"bits": 16}, "value": {"bits": 16}}, **CHUNKS), PROMPTS)
    assert watched.rows["cached"] > 0
    same(found, generate(engine(other, None, **CHUNKS), PROMPTS)[0], limit=1e-3)


@pytest.mark.parametrize("form", [INT4, SAW], ids=["int4", "saw"])
def test_a_model_over_quantized_pages(engine: Engines, other: Path, form: Any, watched: Watched) -> None:
    generate(engine(other, form, **CHUNKS), PROMPTS, 8)
    assert watched.rows["cached"] > 50
