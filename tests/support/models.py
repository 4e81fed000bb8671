"""Small random models of the families that kvgen's cache serves, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "max_position_embeddings": 512, **HEADS}
WINDOW = 24
SLIDING = "sliding_attention"
MORE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0},
    "mistral": {"sliding_window": WINDOW},
    "gemma4_text": {
        "sliding_window": WINDOW,
        "layer_types": [SLIDING, SLIDING, "full_attention"],
        "num_global_key_value_heads": 1,
        "global_head_dim": 64,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "rope_parameters": None,
    },
    "gpt_oss": {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": [SLIDING] * 3},
}
FAMILIES = ("llama", "qwen3", "gemma2", "mistral", "gpt_oss")
"""Those that every supported release of transformers has."""


def model_of(family: str, **changed: Any) -> Any:
    """A causal language model whose attention is far from uniform."""
    from transformers import AutoConfig, AutoModelForCausalLM

    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    config = AutoConfig.for_model(family, **{**SIZES, **rope, **MORE[family], **changed})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "sinks" in name:
                weight.normal_()
            elif weight.dim() > 1:
                weight.mul_(8)
    return model


def plain(bits: int, **cache: Any) -> dict[str, Any]:
    """K per channel and V per token, in so many bits, on the CPU."""
    return {
        "arch": "cpu",
        "key": {"bits": bits, "axis": "channel", "group": 16},
        "value": {"bits": bits, "axis": "token", "group": 32},
        "cache": cache,
    }


def random_ids(batch: int, tokens: int) -> torch.Tensor:
    """Token ids [batch, tokens], none of them special."""
    return torch.randint(3, SIZES["vocab_size"], (batch, tokens), generator=torch.Generator().manual_seed(7))


def stock_of(model: Any) -> Any:
    """transformers' own cache, over eager attention."""
    from transformers import DynamicCache

    model.set_attn_implementation("eager")
    return DynamicCache(config=model.config)


def padded(sides: Sequence[slice], tokens: int) -> torch.Tensor:
    """An attention_mask [len(sides), tokens] with padding in these places."""
    mask = torch.ones(len(sides), tokens, dtype=torch.long)
    for row, side in enumerate(sides):
        mask[row, side] = 0
    return mask


def generated(model: Any, cache: Any, prompt: torch.Tensor, mask: torch.Tensor | None = None, **how: Any) -> torch.Tensor:
    """Eight tokens, greedily, unless `how` says otherwise."""
    from kvgen.integrations.transformers import CACHE_ARGUMENT

    torch.manual_seed(3)
    mask = torch.ones_like(prompt) if mask is None else mask
    how = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None, **how}
    return model.generate(prompt, attention_mask=mask, **{CACHE_ARGUMENT: cache}, **how)
