"""The serving loop: places that are taken and freed, one compiled step for all caches, steps without room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvgen.errors import CacheMismatch
from tests.support.models import model_of, plain, random_ids

pytest.importorskip("transformers")

from kvgen.integrations.transformers import DecodeLoop

EXACT = plain(16, rollback=8)
CacheOf = Callable[..., Any]


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of("llama")


def alone(model: Any, prompt: torch.Tensor, tokens: int) -> list[int]:
    """What `generate` gives for a prompt by itself, with the stock cache."""
    model.set_attn_implementation("eager")
    found = model.generate(prompt[None], max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None)
    model.set_attn_implementation("kvgen")
    return found[0, len(prompt) :].tolist()


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
def test_sequences_take_the_places_of_finished_ones(model: Any, chunk: int | None, cache_of: CacheOf) -> None:
    serve(model, DecodeLoop(model, cache_of(model, EXACT, 2), chunk=chunk))


def test_a_compiled_step_serves_every_cache(cache_of: CacheOf) -> None:
    model = model_of("llama", num_hidden_layers=1)
    torch._dynamo.reset()
    serve(model, DecodeLoop(model, cache_of(model, EXACT, 2), compile={"backend": "aot_eager"}))
    with torch._dynamo.config.patch(error_on_recompile=True):  # another cache, and its steps, run what the first compiled
        serve(model, DecodeLoop(model, cache_of(model, EXACT, 2), compile={"backend": "aot_eager"}))


def test_a_sequence_without_room_is_named_and_the_others_go_on(model: Any, cache_of: CacheOf) -> None:
    loop = DecodeLoop(model, cache_of(model, EXACT, 2, max_len=24))
    loop.add(random_ids(1, 20)[0])
    loop.run(4)
    with pytest.raises(CacheMismatch, match=r"place 0 is full: 24 tokens, the cache's max_len.*Call remove\(0\)"):
        loop.step()
    with pytest.raises(CacheMismatch, match="24 tokens per sequence, and 25"):
        loop.add(random_ids(1, 25)[0])
    assert loop.free == 1
    loop.remove(0)
    assert loop.cache.lengths.tolist() == [0, 0]
    loop.add([5, 6, 7])
    loop.run(2)
    assert sorted(loop.cache.lengths.tolist()) == [0, 5]


def test_what_the_device_refused_in_all_groups_of_layers_is_told_once_with_its_places(cache_of: CacheOf) -> None:
    """On a GPU each group's kernels set a flag of their own, which the next step reads."""
    gemma = model_of("gemma2")
    loop = DecodeLoop(gemma, cache_of(gemma, EXACT, 3, max_len=24))
    places = [loop.add(random_ids(1, length)[0]) for length in (24, 5, 24)]
    assert len(loop.cache.groups) == 2
    for group in loop.cache.groups:
        group.first.sequences.overflow._number.value = 1
    with pytest.raises(CacheMismatch, match=r"places 0, 2 are full: 24 tokens.*remove\(0\), remove\(2\)"):
        loop.step()
    for place in (places[0], places[2]):
        loop.remove(place)
    loop.run(2)
    assert loop.cache.lengths.tolist() == [0, 7, 0]


def test_a_reset_of_the_cache_frees_all_places(model: Any, cache_of: CacheOf) -> None:
    loop, prompt = DecodeLoop(model, cache_of(model, EXACT, 2)), random_ids(1, 20)[0]
    loop.add([5, 6])
    loop.step()
    loop.cache.reset()
    assert (loop.free, loop.tokens.tolist()) == (2, [-1, -1])
    with pytest.raises(ValueError, match="all places are free"):
        loop.step()
    served = Served(loop)
    served.add("a", prompt)
    served.run(3)
    assert served.found["a"] == alone(model, prompt, 4)
