"""The serving loop: places that are taken and freed, one compiled step for all caches, steps without room."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from inspect import signature
from typing import Any

import pytest
import torch

from kvgen.api.fetch import FallbackWarning
from kvgen.errors import CacheMismatch
from tests.support.models import model_of, plain, random_ids

pytest.importorskip("transformers")

from kvgen.integrations.transformers import DecodeLoop, KvgenCache

EXACT = plain(16, rollback=8)


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of("llama")


def cache_of(model: Any, batch: int, max_len: int = 256) -> KvgenCache:
    model.set_attn_implementation("kvgen")
    cache = KvgenCache(model.config, EXACT, batch, max_len)
    cache.groups[0].kernel.set_threads(1)
    return cache


def alone(model: Any, prompt: torch.Tensor, tokens: int) -> list[int]:
    """What `generate` gives for a prompt by itself, with the stock cache."""
    model.set_attn_implementation("eager")
    found = model.generate(prompt[None], max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None)
    model.set_attn_implementation("kvgen")
    return found[0, len(prompt) :].tolist()


def placed(model: Any, tokens: int) -> dict[str, torch.Tensor]:
    """The first positions, for sequences whose lengths differ; the first releases of transformers 5 ask for more of them."""
    places = torch.arange(tokens)
    more = {"cache_position": places} if "cache_position" in signature(model.forward).parameters else {}
    return {"position_ids": places[None], **more}


class Served:
    """A loop, and the tokens of every sequence that it served."""

    def __init__(self, loop: DecodeLoop) -> None:
        self.loop, self.places, self.found = loop, {}, {}

    def add(self, name: str, prompt: torch.Tensor) -> None:
        self.places[name] = self.loop.add(prompt)
        self.found[name] = [int(self.loop.tokens[self.places[name]])]

    def run(self, steps: int) -> None:
        tokens = self.loop.run(steps)
        for name, place in self.places.items():
            self.found[name] += tokens[:, place].tolist()
        free = [place for place in range(self.loop.cache.batch) if place not in self.places.values()]
        assert bool((tokens[:, free] == -1).all())

    def remove(self, name: str) -> None:
        self.loop.remove(self.places.pop(name))


def serve(model: Any, loop: DecodeLoop) -> None:
    """Three prompts for two places, and a chunked prefill beside a sequence; each as if it were alone."""
    prompts = {"a": random_ids(3, 130)[0], "b": random_ids(3, 60)[1], "c": random_ids(3, 1)[2]}
    served = Served(loop)
    served.add("a", prompts["a"])
    served.run(3)
    served.add("b", prompts["b"])
    assert loop.free == 0
    with pytest.raises(ValueError, match="no place is free"):
        loop.add([5])
    served.run(4)
    served.remove("a")
    served.add("c", prompts["c"])
    served.run(5)
    for name, prompt in prompts.items():
        assert served.found[name] == alone(model, prompt, len(served.found[name])), name


@pytest.mark.parametrize("chunk", [None, 50])
def test_sequences_take_the_places_of_finished_ones(model: Any, chunk: int | None) -> None:
    serve(model, DecodeLoop(model, cache_of(model, 2), chunk=chunk))


def test_a_compiled_step_serves_every_cache() -> None:
    model = model_of("llama", num_hidden_layers=1)
    torch._dynamo.reset()
    serve(model, DecodeLoop(model, cache_of(model, 2), compile={"backend": "aot_eager"}))
    with torch._dynamo.config.patch(error_on_recompile=True):  # another cache, and its steps, run what the first compiled
        serve(model, DecodeLoop(model, cache_of(model, 2), compile={"backend": "aot_eager"}))


def test_free_places_are_left_alone(model: Any) -> None:
    cache = cache_of(model, 3)
    loop = DecodeLoop(model, cache)
    first, place = loop.add(random_ids(1, 20)[0]), loop.add([7, 8])
    loop.remove(first)
    held = [layer.cache.k_residual[first].view(torch.int32).clone() for layer in cache.layers]
    loop.run(3)
    assert cache.lengths.tolist() == [5 if row == place else 0 for row in range(3)]
    assert all(
        torch.equal(layer.cache.k_residual[first].view(torch.int32), before) for layer, before in zip(cache.layers, held, strict=True)
    )


def test_a_choice_of_tokens_is_the_callers(model: Any) -> None:
    loop = DecodeLoop(model, cache_of(model, 2), choose=lambda logits: logits.argmin(-1))
    place = loop.add([5, 6])
    assert loop.step()[place] != DecodeLoop(model, cache_of(model, 1)).add([5, 6])
    assert int(loop.tokens[place]) >= 0


def test_a_sequence_without_room_is_named_and_the_others_go_on(model: Any) -> None:
    loop = DecodeLoop(model, cache_of(model, 2, max_len=24))
    loop.add(random_ids(1, 20)[0])
    loop.run(4)
    with pytest.raises(CacheMismatch, match="24"):
        loop.step()
    with pytest.raises(CacheMismatch, match="24 tokens per sequence, and 25"):
        loop.add(random_ids(1, 25)[0])
    assert loop.free == 1
    loop.remove(0)
    assert loop.cache.lengths.tolist() == [0, 0]
    loop.add([5, 6, 7])
    loop.run(2)
    assert sorted(loop.cache.lengths.tolist()) == [0, 5]


def test_a_batch_that_was_prefilled_at_once_is_taken(model: Any) -> None:
    prompts = random_ids(2, 30)
    loop = DecodeLoop(model, cache_of(model, 2))
    with torch.no_grad():
        logits = model(prompts, past_key_values=loop.cache, **placed(model, 30)).logits
    loop.take(logits[:, -1].argmax(-1))
    first = loop.tokens.clone()
    found = torch.cat([first[None], loop.run(5)])
    assert [found[:, row].tolist() for row in range(2)] == [alone(model, prompt, 6) for prompt in prompts]
    with pytest.raises(ValueError, match="some are taken already"):
        loop.take(loop.tokens)


def test_wrong_calls_are_refused(model: Any) -> None:
    cache = cache_of(model, 2)
    loop = DecodeLoop(model, cache)
    with pytest.raises(ValueError, match="all places are free"):
        loop.step()
    with pytest.raises(ValueError, match="at least one token"):
        loop.add([])
    with pytest.raises(ValueError, match="place 1 holds no sequence"):
        loop.remove(1)
    loop.add([5, 6])
    with pytest.raises(ValueError, match="captures a step over an empty cache"):
        DecodeLoop(model, cache)
    with torch.no_grad(), pytest.raises(ValueError, match="pass position_ids"):
        model(torch.tensor([[5], [6]]), past_key_values=cache)
    mask = torch.tensor([[1, 0, 1], [1, 1, 1]])
    with torch.no_grad(), pytest.raises(ValueError, match="filled one by one: pass none"):
        model(torch.tensor([[5], [6]]), past_key_values=cache, attention_mask=mask, **placed(model, 1))
