"""What a cache keeps between calls of a model: padding, several turns, copies, a forward pass that broke off. What is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvgen.errors import CacheMismatch, KvgenError, UnsupportedError
from kvgen.runtime.kvcache import KVCache
from tests.support.models import generated, model_of, padded, plain, random_ids, stock_of

pytest.importorskip("transformers")


from kvgen.integrations.transformers import CACHE_ARGUMENT

CacheOf = Callable[..., Any]
EXACT = plain(16, rollback=8)


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of("llama")


def widened(mask: torch.Tensor, *more: torch.Tensor | int) -> torch.Tensor:
    """A mask, and behind it others or so many tokens that are not padding."""
    return torch.cat([mask, *(torch.ones(len(mask), x, dtype=torch.long) if isinstance(x, int) else x for x in more)], 1)


# --- padding ----------------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize(
    ("mask", "match"),
    [
        (None, r"past positions hold padding: give an attention_mask of shape \[2, 9\]"),
        (padded([], 9), r"must have shape \[2, 9\]"),
        (padded([slice(0, 0)] * 2, 1), r"must have shape \[2, 9\], past and new positions, not \[2, 1\]"),
        (padded([slice(0, 0)] * 2, 9), "shows position 0 of sequence 0, which came as padding"),
        (padded([slice(1, 3), slice(0, 0)], 9), "shows position 0 of sequence 0"),  # as many tokens, at other places
        (padded([slice(0, 2), slice(5, 6)], 9), "hides position 5 of sequence 1, which came as a token"),
    ],
)
def test_masks_that_disagree_with_the_padding_that_came_are_refused(
    mask: torch.Tensor | None, match: str, model: Any, cache_of: CacheOf
) -> None:
    first, ids = padded([slice(0, 2), slice(0, 0)], 8), random_ids(2, 9)
    cache = cache_of(model, EXACT, 2)
    model(ids[:, :8], attention_mask=first, past_key_values=cache)
    with pytest.raises(ValueError, match=match):
        model(ids[:, 8:], attention_mask=mask, past_key_values=cache)
    found = model(ids[:, 8:], attention_mask=widened(first, 1), past_key_values=cache).logits
    whole = model(ids, attention_mask=widened(first, 1), past_key_values=cache_of(model, EXACT, 2)).logits
    torch.testing.assert_close(found, whole[:, 8:], rtol=0, atol=2e-4)


# --- crops ------------------------------------------------------------------------------------------------------------------


def test_crops_of_more_than_the_rollback_in_all_are_refused_by_the_host(
    model: Any, cache_of: CacheOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU would refuse them later, when the host has counted their positions as taken back."""
    cache, ids = cache_of(model, EXACT, 2), random_ids(2, 21)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        cache.crop(-6)
        for other in (copy.deepcopy(cache), cache):
            with monkeypatch.context() as patch:
                patch.setattr(KVCache, "crop", lambda *_: pytest.fail("the device is asked"))
                with pytest.raises(ValueError, match=r"crop\(6\): at most 2 positions can be taken back now.*rollback of the spec is 8"):
                    other.crop(-6)
            assert (other.get_seq_length(), other.lengths.tolist()) == (14, [14, 14])
            other.crop(-2)
            found = model(ids[:, 12:], past_key_values=other).logits
            want = model(ids, past_key_values=cache_of(model, EXACT, 2)).logits
            torch.testing.assert_close(found, want[:, 12:], rtol=0, atol=2e-4)
            other.crop(-8)  # of 21 positions, the most so far
            assert other.lengths.tolist() == [13, 13]


# --- turns ------------------------------------------------------------------------------------------------------------------


def test_a_conversation_goes_on(model: Any, cache_of: CacheOf) -> None:
    """Each sequence fits into the cache in the end, though the longest tokens of both turns together do not."""
    turns = [random_ids(2, 30), random_ids(2, 24)]
    mask, more = padded([slice(0, 0), slice(0, 20)], 30), padded([slice(0, 20), slice(0, 0)], 24)
    found = []
    for cache in (stock_of(model), cache_of(model, EXACT, 2, max_len=60)):
        model.set_attn_implementation("kvgen" if found else "eager")
        first = generated(model, cache, turns[0], mask, max_new_tokens=2)
        found.append(generated(model, cache, torch.cat([first, turns[1]], 1), widened(mask, 2, more), max_new_tokens=20))
    assert torch.equal(*found)
    assert cache.lengths.tolist() == [55, 55]


# --- copies -----------------------------------------------------------------------------------------------------------------


def test_a_copy_goes_on_by_itself(model: Any, cache_of: CacheOf) -> None:
    prefix, mask = random_ids(4, 20), padded([slice(0, 0), slice(0, 3), slice(0, 0), slice(0, 3)], 20)
    ids = torch.cat([prefix, random_ids(4, 25)[:, 20:]], 1)[:2]
    cache = cache_of(model, EXACT, 4)
    twice, places = [0, 0, 1, 1], (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        model(prefix[twice], attention_mask=mask[twice], position_ids=places[twice], past_key_values=cache)
    other = copy.deepcopy(cache)
    want = generated(model, cache, ids, widened(mask[:2], 5), num_beams=2)
    assert (cache.lengths.tolist(), other.lengths.tolist()) == ([32, 32, 29, 29], [20, 20, 17, 17])
    assert torch.equal(generated(model, other, ids, widened(mask[:2], 5), num_beams=2), want)
    assert torch.equal(generated(model, stock_of(model), ids, widened(mask[:2], 5), num_beams=2), want)


# --- forward passes ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_pass_that_broke_off_counts_for_no_layer(cache_of: CacheOf) -> None:
    """Gemma-2's layers have two specs: the full layer has run when the last sliding one fails."""
    model, ids = model_of("gemma2"), random_ids(2, 9)
    cache = cache_of(model, plain(16), 2)
    want = generated(model, cache, ids)
    cache.reset()
    model(ids[:, :8], past_key_values=cache)
    hook = model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids[:, 8:], past_key_values=cache)
    hook.remove()
    assert [group.first.lengths.tolist() for group in cache.groups] == [[8, 8]] * 2
    with pytest.raises(KvgenError, match=r"ended after 2 of 3 layers: call cache.reset\(\) if it broke off"):
        model(ids[:, 8:], past_key_values=cache)
    cache.reset()
    assert torch.equal(generated(model, cache, ids), want)


def held(cache: Any) -> list[torch.Tensor]:
    """A copy of all bytes that the layers hold, and of the lengths."""
    tensors = [x for layer in cache.layers for x in (layer.cache.packed, layer.cache.k_residual, layer.cache.v_residual)]
    return [x.view(torch.uint8).clone() for x in (*tensors, cache.lengths)]


@torch.no_grad()
def test_a_padded_chunk_without_room_for_one_sequence_writes_nothing(model: Any, cache_of: CacheOf) -> None:
    """Sequences run one after the other, and the first has room."""
    cache, ids = cache_of(model, EXACT, 2, max_len=10), random_ids(2, 13)
    first, chunk = padded([slice(0, 4), slice(0, 0)], 8), padded([slice(0, 1), slice(0, 0)], 5)
    model(ids[:, :8], attention_mask=first, past_key_values=cache)
    before = held(cache)
    with pytest.raises(CacheMismatch, match="the cache holds max_len=10 tokens per sequence, and sequence 1 would have 13"):
        model(ids[:, 8:], attention_mask=widened(first, chunk), past_key_values=cache)
    assert all(torch.equal(*pair) for pair in zip(held(cache), before, strict=True))
    found = model(ids[:, 8:10], attention_mask=widened(first, 2), past_key_values=cache).logits
    want = model(ids[:, :10], attention_mask=widened(first, 2), past_key_values=cache_of(model, EXACT, 2)).logits
    torch.testing.assert_close(found, want[:, 8:], rtol=0, atol=2e-4)


# --- refusals ---------------------------------------------------------------------------------------------------------------


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
        (lambda: cache_of(model, [plain(4), plain(4), plain(4, rollback=2)], 1), "must be the same in all"),
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
