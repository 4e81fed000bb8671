"""What the integration refuses, each with a sentence that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvgen.errors import KvgenError, UnsupportedError
from tests.support.models import generated, model_of, padded, plain, random_ids

pytest.importorskip("transformers")

from transformers import AutoConfig

from kvgen.integrations.transformers import CACHE_ARGUMENT, layer_specs

CacheOf = Callable[..., Any]
EXACT = plain(16, rollback=8)


@torch.no_grad()
def test_what_cannot_be_done_is_refused(cache_of: CacheOf) -> None:
    model, ids = model_of("llama"), random_ids(2, 8)
    cache = cache_of(model, EXACT, 2)

    def run(**given: Any) -> None:
        model(ids, **{"past_key_values": cache, **given})

    for given, error, match in (
        ({"past_key_values": None}, ValueError, rf"needs {CACHE_ARGUMENT}=KvgenCache"),
        ({"past_key_values": cache_of(model, EXACT, 3)}, ValueError, "holds 3 sequences, and the model runs 2"),
        ({"attention_mask": padded([slice(0, 2), slice(0, 0)], 9)}, ValueError, r"must have shape \[2, 8\], past and new positions"),
    ):
        with pytest.raises(error, match=match):
            run(**given)
    assert cache.get_seq_length() == 0
    run(attention_mask=padded([slice(0, 2), slice(0, 0)], 8))
    model.train()
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(UnsupportedError, match="no dropout"):
        run(attention_mask=padded([slice(0, 2), slice(0, 0)], 16))
    model.eval()
    with torch.enable_grad(), pytest.raises(ValueError, match="no gradient"):
        run(attention_mask=padded([slice(0, 2), slice(0, 0)], 16))
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match='needs the attention function "kvgen", and the model has "sdpa"'):
        run()
    other = cache_of(model_of("llama"), EXACT, 2)  # of another configuration, which cannot tell what the model has
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        with pytest.raises(ValueError, match='needs the attention function "kvgen", and the model has another one'):
            run(past_key_values=other)
    for call, match in (
        (lambda: cache.batch_repeat_interleave(2), "fixed batch"),
        (lambda: cache.batch_select_indices(torch.zeros(1, dtype=torch.long)), "fixed batch"),
        (lambda: cache_of(model, [plain(4), plain(4), plain(4, rollback=2)], 1), "cache.rollback must be one number, not"),
    ):
        with pytest.raises(ValueError, match=match):
            call()


@torch.no_grad()
def test_layers_that_are_left_out_or_differ_from_their_spec_are_refused(cache_of: CacheOf) -> None:
    model, ids = model_of("llama"), random_ids(1, 8)
    cache = cache_of(model, EXACT, 1)
    model.model.layers[1].self_attn.layer_idx = 2
    with pytest.raises(KvgenError, match="layer 2 ran where layer 1 was due"):
        model(ids, past_key_values=cache)
    gemma = model_of("gemma2")
    cache = cache_of(gemma, plain(16), 1)
    gemma.model.layers[1].self_attn.attn_logit_softcapping = 30.0
    with pytest.raises(ValueError, match=r"layer 1 runs with softcap 30.0, and attention.softcap of its spec is 5.0"):
        gemma(ids, past_key_values=cache)


@torch.no_grad()
@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"output_attentions": True}, "do not return attention weights"),
        ({"use_cache": False}, "pass use_cache=True"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 8])}, "packed sequences"),
        ({"attention_mask": torch.ones(1, 8, 8)}, "attention_mask has 3 dimensions"),
        ({"attention_mask": torch.ones(1, 1, 8, 8, dtype=torch.bool)}, "attention_mask has 4 dimensions"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_calls_that_need_more_than_causal_attention_are_refused(given: dict[str, Any], match: str, cache_of: CacheOf) -> None:
    model = model_of("llama", num_hidden_layers=1)
    with pytest.raises(UnsupportedError, match=f"KvgenCache: .*{match}"):
        model(random_ids(1, 8), past_key_values=cache_of(model, EXACT, 1), **given)


@torch.no_grad()
def test_a_model_that_is_not_the_caches_is_refused(cache_of: CacheOf) -> None:
    model, ids = model_of("llama"), random_ids(1, 8)
    for changed, match in (
        ({"num_hidden_layers": 4}, "the model runs layer 3, and the cache has 3 layers"),
        ({"num_hidden_layers": 2}, "ended after 2 of 3 layers.*a model with fewer layers needs a cache of its own configuration"),
        ({"num_key_value_heads": 4}, "layer 0 runs with kv_heads 4, and attention.kv_heads of its spec is 2"),
        ({"head_dim": 64}, "layer 0 runs with head_dim 64, and attention.head_dim of its spec is 32"),
        ({"dtype": torch.bfloat16}, "runs with dtype bfloat16, and .* float32: put attention: {dtype: bfloat16} into the spec"),
    ):
        other = model_of("llama", **changed).to(changed.get("dtype"))
        other.set_attn_implementation("kvgen")
        with pytest.raises((KvgenError, ValueError), match=match):
            generated(other, cache_of(model, EXACT, 1), ids)
    unknown = model_of("gpt_oss")
    unknown.config.model_type = "unknown"
    with pytest.raises(ValueError, match=r"runs with sinks True, .*: put attention: {sinks: true} into the spec"):
        generated(unknown, cache_of(unknown, plain(16), 1), ids)


@torch.no_grad()
def test_v_that_changes_after_the_cache_took_it_is_refused(cache_of: CacheOf, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama", num_hidden_layers=1)
    cache = cache_of(model, EXACT, 1)
    update = type(cache).update
    monkeypatch.setattr(type(cache), "update", lambda *given, **more: (lambda k, v: (k, v * 2))(*update(*given, **more)))
    with pytest.raises(UnsupportedError, match="the model changes V"):
        model(random_ids(1, 8), past_key_values=cache)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("t5", "encoder-decoder"),
        ("gemma3n_text", "share K and V"),
        ("deepseek_v3", r"latent attention \(MLA\)"),
    ],
)
def test_models_whose_cache_is_not_kvgens_are_refused(kind: str, match: str) -> None:
    with pytest.raises(UnsupportedError, match=match):
        layer_specs(AutoConfig.for_model(kind), EXACT)
