"""transformers' serving loop on a GPU: one captured step for sequences that come and go, plain and compiled, and generate()."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from kvgen.integrations.transformers import DecodeLoop, KvgenCache
from tests.support.models import model_of, random_ids

pytestmark = pytest.mark.filterwarnings("ignore::kvgen.api.FallbackWarning")

DEVICE = "cuda"
WIDE = {"bits": 16, "axis": "token", "group": 64}
FORMAT = {"attention": {"dtype": "float16"}, "key": WIDE, "value": WIDE}
"""Not quantized, so that the stock attention tells what is right."""
CLOSE = 0.02
"""Of the range of the logits: what 16 bits may confuse."""


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of("llama", head_dim=64).half().to(DEVICE)


def cache_of(model: Any, batch: int, **more: Any) -> KvgenCache:
    model.set_attn_implementation("kvgen")
    return KvgenCache(model.config, {**FORMAT, **more}, batch, 256, device=model.device)


@torch.no_grad()
def assert_likeliest(model: Any, prompt: torch.Tensor, tokens: list[int]) -> None:
    """Every token is the likeliest after the prompt and the tokens before it, or nearly so."""
    model.set_attn_implementation("eager")
    ids = torch.cat([prompt, torch.tensor(tokens[:-1], dtype=torch.int64)]).to(DEVICE)
    logits = model(ids[None]).logits[0, len(prompt) - 1 :].float()
    model.set_attn_implementation("kvgen")
    chosen = logits[torch.arange(len(tokens)), torch.tensor(tokens)]
    assert float((logits.amax(-1) - chosen).max()) <= CLOSE * float(logits.amax() - logits.amin())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_sequences_come_and_go_while_one_graph_is_replayed(model: Any, compiled: bool) -> None:
    torch._dynamo.reset()
    cache = cache_of(model, 2)
    loop = DecodeLoop(model, cache, compile={"backend": "aot_eager", "dynamic": True} if compiled else False)
    prompts = dict(zip("abc", random_ids(3, 130), strict=True))
    prompts["b"] = prompts["b"][:7]
    places: dict[str, int] = {}
    found: dict[str, list[int]] = {}

    def add(name: str) -> None:
        places[name] = loop.add(prompts[name])
        found[name] = [int(loop.tokens[places[name]])]

    def run(steps: int) -> None:
        tokens = loop.run(steps).cpu()
        for name, place in places.items():
            found[name] += tokens[:, place].tolist()
        free = [place for place in range(2) if place not in places.values()]
        assert bool((tokens[:, free] == -1).all())

    add("a")
    run(3)
    add("b")
    run(40)
    loop.remove(places.pop("a"))
    run(2)
    add("c")
    run(5)
    assert sorted(cache.lengths.tolist()) == sorted([7 + 47, 130 + 5])
    for name, tokens in found.items():
        assert_likeliest(model, prompts[name], tokens)


def test_generate_over_a_packed_cache(model: Any) -> None:
    """Padding on the left of the shorter prompt."""
    prompts, mask = random_ids(2, 40), torch.ones(2, 40, dtype=torch.int64)
    mask[0, :15] = 0
    cache = cache_of(model, 2)
    ids = model.generate(
        prompts.to(DEVICE), attention_mask=mask.to(DEVICE), past_key_values=cache, max_new_tokens=12, do_sample=False, pad_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    for row, first in enumerate((15, 0)):
        assert_likeliest(model, prompts[row, first:], ids[row, 40:].tolist())
