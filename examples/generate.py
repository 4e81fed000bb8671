"""A small random model generates over kvgen's int8 and int4 caches, beside the stock cache. A minute on any CPU.

    pip install 'kvgen[transformers]'
    python examples/generate.py

For a model of your own, replace `small_model` by `AutoModelForCausalLM.from_pretrained(name, attn_implementation="kvgen")`.
"""

from __future__ import annotations

import time
import warnings

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

import kvgen
from kvgen.integrations.transformers import CACHE_ARGUMENT, KvgenCache

BATCH, PROMPT, NEW = 2, 600, 40


def small_model() -> PreTrainedModel:
    """Llama's architecture with random weights in float32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="kvgen").eval()


def format_of(bits: int) -> dict[str, object]:
    """K per channel, V per token. Heads and dtype come from the model's configuration."""
    return {"arch": "cpu", "key": {"bits": bits, "axis": "channel", "group": 128}, "value": {"bits": bits, "axis": "token", "group": 64}}


def main() -> None:
    """Generate greedily from two prompts, of which one is shorter and padded on the left."""
    warnings.simplefilter("ignore", kvgen.FallbackWarning)  # nothing is tuned for so small a model
    model = small_model()
    prompts = torch.randint(3, 1000, (BATCH, PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(prompts)
    mask[1, :100] = 0
    stock: torch.Tensor | None = None
    for name, cache in {
        "stock": DynamicCache(config=model.config),
        "16 bits": KvgenCache(model.config, format_of(16), BATCH, PROMPT + NEW),
        "int8": KvgenCache(model.config, format_of(8), BATCH, PROMPT + NEW),
        "int4": KvgenCache(model.config, format_of(4), BATCH, PROMPT + NEW),
    }.items():
        model.set_attn_implementation("sdpa" if name == "stock" else "kvgen")
        started = time.perf_counter()
        found = model.generate(
            prompts, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None, **{CACHE_ARGUMENT: cache}
        )[:, PROMPT:]
        seconds = time.perf_counter() - started
        stock = found if stock is None else stock
        same = int((found == stock).long().cumprod(1).sum(1).min())
        size = f"{cache.nbytes / 1024:7.0f} KiB" if isinstance(cache, KvgenCache) else " " * 11
        print(f"{name:8} {size}  {seconds:5.1f} s, tokens as with the stock cache: the first {same} of {NEW}")


if __name__ == "__main__":
    main()
