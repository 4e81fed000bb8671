"""Models over packed weights on a GPU: logits, one captured step over weights and cache of 4 bits, plain and compiled, and files."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from kvgen.api import FallbackWarning
from kvgen.integrations.linears import QuantizedLinear
from kvgen.integrations.transformers import DecodeLoop, KvgenCache, load_quantized, quantize_weights, quantized_linears, save_quantized
from tests.support.models import model_of, random_ids

pytestmark = pytest.mark.filterwarnings("ignore::kvgen.api.FallbackWarning")

INT4 = {"attention": {"dtype": "float16"}, "key": {"bits": 4, "axis": "channel"}, "value": {"bits": 4, "axis": "token", "group": 64}}
CLOSE = 0.02
"""Of the range of logits: what 16 bits may confuse."""


@pytest.fixture(scope="module")
def model() -> Any:
    found = model_of("llama", head_dim=64, intermediate_size=128, vocab_size=112).half().to("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        quantize_weights(found, {"bits": 4, "group": 64}, head={"bits": 8, "group": 64})
    return found


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, rows: int | None = None) -> torch.Tensor:
    """Of the kernels, or with `rows=0` of torch over the weights that are meant."""
    model.set_attn_implementation("eager")
    layers = quantized_linears(model).values()
    for layer in layers:
        layer.rows = layer.kernel.rows if rows is None else rows
    found: torch.Tensor = model(ids.cuda()).logits.float()
    for layer in layers:
        layer.rows = layer.kernel.rows
    return found


@pytest.mark.parametrize("tokens", [1, 7, 16, 33, 128])
def test_logits_are_those_of_the_weights_that_are_meant(model: Any, tokens: int) -> None:
    wide = [layer.wide_calls for layer in quantized_linears(model).values()]
    mine = logits(model, random_ids(1, tokens))
    assert [layer.wide_calls for layer in quantized_linears(model).values()] == wide
    wanted = logits(model, random_ids(1, tokens), rows=0)
    assert (mine - wanted).abs().max() < CLOSE * (wanted.max() - wanted.min())


def test_rows_depend_on_no_others_where_that_is_asked_for(model: Any) -> None:
    """The bits of a row are those of a call with it alone, also beyond the rows of a launch; weights are then written by no kernel."""
    for layer in list(quantized_linears(model).values())[:4]:
        alone = QuantizedLinear(layer.spec, layer.packed, layer.bias, wide="invariant")
        x = torch.randn(300, layer.in_features, device="cuda").half()
        whole = alone(x)
        assert all(torch.equal(alone(x[rows]), whole[rows]) for rows in (slice(0, 1), slice(120, 137), slice(299, 300)))
        assert alone.wide_calls == 0


def test_more_rows_than_launches_take(model: Any) -> None:
    """They multiply by the weight in 16 bits, which a kernel writes."""
    for layer in quantized_linears(model).values():
        assert layer.kernel.module.expand is not None
        x = torch.randn(200, layer.in_features, device="cuda").half()
        counted = layer.wide_calls
        wide, parts = layer(x), torch.cat([layer(x[:100]), layer(x[100:])])
        assert layer.wide_calls == counted + 1
        assert (wide - parts).abs().max() <= CLOSE * parts.abs().max()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_one_graph_over_packed_weights_and_a_packed_cache(model: Any, compiled: bool) -> None:
    """The tokens of a captured step are those of the same model called step by step, over a cache of its own."""
    torch._dynamo.reset()
    model.set_attn_implementation("kvgen")
    prompts = random_ids(2, 70)
    prompts = [prompts[0], prompts[1][:9]]
    loop = DecodeLoop(model, KvgenCache(model.config, INT4, 2, 256, device="cuda"), compile={"dynamic": True} if compiled else False)
    for prompt in prompts:
        loop.add(prompt)
    first = loop.tokens.tolist()
    found = loop.run(24)
    with torch.no_grad():
        for place, prompt in enumerate(prompts):
            cache = KvgenCache(model.config, INT4, 1, 256, device="cuda")
            model(prompt[None].cuda(), **cache.argument, use_cache=True)
            token = first[place]
            for step in range(24):
                row = model(torch.tensor([[token]], device="cuda"), **cache.argument, use_cache=True).logits[0, -1].float()
                token = int(found[step, place])
                assert row.max() - row[token] <= CLOSE * (row.max() - row.min()), (place, step)


def test_a_saved_model_is_the_same(model: Any, tmp_path: Path) -> None:
    save_quantized(model, tmp_path)
    again = load_quantized(tmp_path)
    assert again.device.type == "cuda"
    layers = quantized_linears(again)
    assert all(torch.equal(layer.packed, layers[name].packed) for name, layer in quantized_linears(model).items())
    one, other = logits(again, random_ids(2, 9)), logits(model, random_ids(2, 9))  # half() rounds rotary frequencies, a file does not
    assert (one - other).abs().max() < CLOSE * (other.max() - other.min())
