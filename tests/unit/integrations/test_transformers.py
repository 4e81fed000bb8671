"""Models of transformers over kvgen's caches: the same logits as with the stock cache, or as the format explains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

from kvgen.errors import UnsupportedError
from tests.support.models import FAMILIES, SLIDING, WINDOW, generated, model_of, padded, plain, random_ids, stock_of
from tests.support.reference import ReferenceCache

pytest.importorskip("transformers")

from transformers import CONFIG_MAPPING

from kvgen.integrations.transformers import KvgenCache, layer_specs
from kvgen.integrations.transformers.cache import KvgenLayer
from kvgen.integrations.transformers.passes import States

pytestmark = pytest.mark.slow

CacheOf = Callable[..., Any]
FULL, PROMPT, TOKENS = "full_attention", 130, 140
"""A prompt fills a block of 128 tokens; with five tokens of padding, decode steps do."""
EXACT = {"llama": plain(16, rollback=8), "qwen3": plain(16, rollback=8)}
"""16 bits; the others have no rollback."""
QUANTIZED: dict[str, Any] = {
    "llama": plain(4),
    "qwen3": plain(4),
    "mistral": plain(4),
    "gemma2": {FULL: plain(16), SLIDING: plain(4)},
    "gpt_oss": {FULL: plain(8), SLIDING: plain(16)},
}


def exact(family: str) -> dict[str, Any]:
    return EXACT.get(family, plain(16))


LEFT = padded([slice(0, 21), slice(0, 0), slice(0, 5)], TOKENS)


@torch.no_grad()
def forced(model: Any, cache: Any, chunks: Sequence[int], mask: torch.Tensor | None = None) -> torch.Tensor:
    """Logits [batch, TOKENS, vocabulary] of given tokens, in pieces that end at `chunks` and one by one from there on."""
    batch = 3 if mask is None else len(mask)
    ids, found = random_ids(batch, TOKENS), []
    ends = [0, *chunks, *range(chunks[-1] + 1, TOKENS + 1)]
    for start, end in pairwise(ends):
        known: dict[str, Any] = {}
        if mask is not None:
            known = {"attention_mask": mask[:, :end], "position_ids": (mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, start:]}
        found.append(model(ids[:, start:end], past_key_values=cache, **known).logits)
    return torch.cat(found, 1)


# --- 16 bits: the stock cache's logits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunks", [(PROMPT,), (10, 60, 131)], ids=["prompt", "chunks"])
def test_logits_are_those_of_the_stock_cache(family: str, chunks: tuple[int, ...], cache_of: CacheOf) -> None:
    model = model_of(family)
    for mask in (None, LEFT):
        want = forced(model, stock_of(model), chunks, mask)
        cache = cache_of(model, exact(family), 3)
        real = slice(None) if mask is None else mask.bool()
        torch.testing.assert_close(forced(model, cache, chunks, mask)[real], want[real], rtol=0, atol=2e-4)
        assert cache.get_seq_length() == TOKENS
        assert cache.lengths.tolist() == ([TOKENS] * 3 if mask is None else LEFT.sum(1).tolist())
    assert {layer.spec.attention.window for layer in cache.layers} == {"gemma2": {None, WINDOW}, "llama": {None}, "qwen3": {None}}.get(
        family, {WINDOW}
    )


@pytest.mark.parametrize(
    ("how", "rows"),
    [
        ({}, 1),
        ({"do_sample": True, "num_return_sequences": 2}, 2),
        ({"num_beams": 3}, 3),
        ({"num_beams": 2, "do_sample": True}, 2),
        ({"prefill_chunk_size": 50}, 1),
    ],
    ids=["greedy", "samples", "beams", "sampled beams", "chunked prefill"],
)
def test_generate_gives_what_it_gives_with_the_stock_cache(how: dict[str, Any], rows: int, cache_of: CacheOf) -> None:
    model, prompt, mask = model_of("llama"), random_ids(3, PROMPT), LEFT[:, :PROMPT]
    want = generated(model, stock_of(model), prompt, mask, **how)
    cache = cache_of(model, exact("llama"), 3 * rows)
    assert torch.equal(generated(model, cache, prompt, mask, **how), want)
    cache.reset()
    assert torch.equal(generated(model, cache, prompt, mask, **how), want)


def test_assisted_decoding_crops_within_the_rollback(cache_of: CacheOf) -> None:
    model, prompt = model_of("llama"), random_ids(1, PROMPT)
    assistant = model_of("llama", num_hidden_layers=1)
    want = generated(model, stock_of(model), prompt, eos_token_id=2)
    for help_ in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}):
        cache = cache_of(model, EXACT["llama"], 1)
        assert torch.equal(generated(model, cache, prompt, eos_token_id=2, **help_), want)
    cache = cache_of(model, EXACT["llama"], 1)
    with torch.no_grad():
        model(prompt, past_key_values=cache)
    cache.crop(-8)
    assert cache.get_seq_length() == PROMPT - 8
    cache.reset()
    with torch.no_grad():
        model(prompt, past_key_values=cache)
    with pytest.raises(ValueError, match=r"crop\(9\): at most 8 positions can be taken back now; cache.rollback of the spec is 8"):
        cache.crop(-9)
    with pytest.raises(ValueError, match=r"no cache.rollback, the most tokens that may be taken back|requires a cache that can be cropped"):
        generated(model, cache_of(model, plain(4), 1), prompt, assistant_model=assistant)


# --- quantized: the logits that the format explains -------------------------------------------------------------------------


class Oracle:
    """kvgen's attention, and beside it that of each format's fp64 reference, which appends, attends and quantizes as the numerics say."""

    def __init__(self, cache: KvgenCache, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layers = [ReferenceCache(layer.group.kernel.spec, cache.batch, layer.cache.block_tokens) for layer in cache.layers]
        self.errors: list[float] = []
        run = KvgenLayer.run

        def both(layer: KvgenLayer, x: States, mask: torch.Tensor | None) -> torch.Tensor:
            out = run(layer, x, mask)
            want, _ = self.layers[layer.layer_idx].decode(x.q, x.k, x.v, scale=x.scale, sinks=x.sinks)
            self.errors.append(float((out - want).abs().max() / want.abs().max()))
            return out

        monkeypatch.setattr(KvgenLayer, "run", both)


@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_logits_are_those_of_the_format(family: str, monkeypatch: pytest.MonkeyPatch, cache_of: CacheOf) -> None:
    model = model_of(family, **({"layer_types": [SLIDING, FULL, SLIDING]} if family == "gpt_oss" else {}))
    whole = forced(model, stock_of(model), (PROMPT,))
    cache = cache_of(model, QUANTIZED[family], 3)
    oracle = Oracle(cache, monkeypatch)
    got = forced(model, cache, (PROMPT,))
    assert len(oracle.errors) == 3 * (1 + TOKENS - PROMPT)
    assert max(oracle.errors) < 1e-4
    torch.testing.assert_close(got[:, :PROMPT], whole[:, :PROMPT], rtol=0, atol=2e-4)  # a prompt attends to its own K and V
    error = float((got - whole)[:, PROMPT:].norm() / whole[:, PROMPT:].norm())
    assert 1e-4 < error < (0.02 if family == "gpt_oss" else 0.35), error  # what follows reads codes


# --- layers, specs and refusals ---------------------------------------------------------------------------------------------


def test_layers_may_have_other_heads(cache_of: CacheOf) -> None:
    """Gemma-4: one wide KV head in full layers, two narrow ones in sliding layers."""
    if "gemma4_text" not in CONFIG_MAPPING:
        pytest.skip("this release of transformers has no Gemma-4")
    model, prompt, mask = model_of("gemma4_text"), random_ids(3, 40), LEFT[:, :40]
    want = generated(model, stock_of(model), prompt, mask)
    cache = cache_of(model, plain(16), 3)
    assert [(each.spec.attention.kv_heads, each.spec.attention.head_dim) for each in cache.layers] == [(2, 32), (2, 32), (1, 64)]
    assert torch.equal(generated(model, cache, prompt, mask), want)


def test_specs_follow_the_configuration() -> None:
    config = model_of("gemma2").config
    specs = layer_specs(config, plain(4), batch=2, max_len=64)
    assert [spec.attention.window for spec in specs] == [WINDOW, None, WINDOW]
    assert {(s.attention.q_heads, s.attention.kv_heads, s.attention.head_dim, s.attention.softcap) for s in specs} == {(4, 2, 32, 5.0)}
    assert specs[0].attention.dtype == "float32"
    assert specs[0].workloads[0].key == "2x64"
    assert layer_specs(config, [*specs]) == specs
    half = layer_specs(config, {**plain(4), "attention": {"dtype": "bfloat16", "q_len": 4}})[1]
    assert (half.attention.dtype, half.attention.q_len) == ("bfloat16", 4)
    assert layer_specs(model_of("gpt_oss").config, {"preset": "kivi-int2", "arch": "cpu"})[0].attention.sinks
    for spec, match in (
        (specs[0], "layer 1: attention.window of the spec is 24, and None in the model's configuration"),
        ({**plain(4), "attention": {"kv_heads": 4}}, "attention.kv_heads of the spec is 4, and 2"),
        ([plain(4)], "the model has 3 layers, and 1 formats were given"),
        ({FULL: plain(4)}, "the model has layers of type sliding_attention"),
    ):
        with pytest.raises(ValueError, match=match):
            layer_specs(config, spec)
    llama = model_of("llama").config
    llama.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(UnsupportedError, match="layer 1 of llama is of type linear_attention"):
        layer_specs(llama, plain(4))
    del llama.layer_types
    llama.kv_lora_rank = 8
    with pytest.raises(UnsupportedError, match=r"latent attention \(MLA\)"):
        layer_specs(llama, plain(4))
