"""The attention function `kvgen` and its masks, as transformers calls them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, bidirectional_mask_function

from kvgen.errors import UnsupportedError
from kvgen.integrations.transformers.cache import CACHE_ARGUMENT, NAME, Appended, KvgenLayer, layer_of
from kvgen.integrations.transformers.passes import States


def register() -> None:
    """Make `attn_implementation="kvgen"` known. Without the mask function transformers would pass no masks, and padding would be seen."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, padding_mask)


def padding_mask(*_: Any, attention_mask: Tensor | None = None, **given: Any) -> Tensor | None:
    """The attention_mask, bool [batch, positions], 0 for padding. Causality and windows are the kernel's.

    Raises UnsupportedError for masks that are more than causality, a window and padding.
    """
    function = given.get("mask_function")
    if given.get("allow_is_causal_skip") is False or given.get("use_vmap") or function is bidirectional_mask_function:
        raise _refusal("the model's mask is more than causality, a sliding window and padding")
    return attention_mask


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention of query [batch, q_heads, tokens, head_dim] over the cache that `key` leads to.

    Returns (out [batch, tokens, q_heads, head_dim], None).

    Raises ValueError without a KvgenCache, and where the model's attention is not that of the layer's spec, UnsupportedError for what
    kvgen's kernels do not compute.
    """
    if not isinstance(key, Appended):
        raise ValueError(
            f'attn_implementation="{NAME}" needs {CACHE_ARGUMENT}=KvgenCache(model.config, ...); for other caches, or none, call '
            'model.set_attn_implementation("sdpa")'
        )
    layer = key.layer
    if not torch.compiler.is_compiling() and value is not key.v:
        raise _refusal("the model changes V after the cache has taken it")
    _refuse(module, layer, attention_mask, dropout, more)
    _agree(layer, query, key.k, {"window": sliding_window, "softcap": softcap or 0.0, "sinks": s_aux is not None})
    q, k, v = (x.transpose(1, 2) for x in (query, key.k, key.v))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if torch.compiler.is_compiling():
        return cached_attention(q, k, v, attention_mask, s_aux, float(scale), layer.number, layer.layer_idx), None
    return _run(layer, q, k, v, attention_mask, s_aux, scale), None


def _refuse(module: torch.nn.Module, layer: KvgenLayer, mask: Tensor | None, dropout: float, more: dict[str, Any]) -> None:
    """Raises UnsupportedError for attention that is not causal self-attention without extras."""
    reason = None
    if mask is not None and mask.dim() != 2:
        reason = f"attention_mask has {mask.dim()} dimensions; kvgen takes [batch, positions], 0 for padding"
    elif more.get("output_attentions"):
        reason = "the kernels do not return attention weights (output_attentions); eager attention over a DynamicCache does"
    elif more.get("cu_seq_lens_q") is not None:
        reason = "packed sequences (cu_seq_lens_q); give each a row of the batch, and an attention_mask"
    elif more.get("use_cache") is False:
        reason = "use_cache=False with a cache, which appends every token that the model runs; pass use_cache=True"
    elif more.get("position_bias") is not None:
        reason = "the model adds a position bias to the scores"
    elif more.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        reason = "the model's attention is not causal"
    elif dropout:
        reason = "the kernels have no dropout: call model.eval()"
    elif module.layer_idx != layer.layer_idx:
        reason = f"layer {module.layer_idx} reads the cache of layer {layer.layer_idx}"
    if reason is not None:
        raise _refusal(reason)


def _refusal(reason: str) -> UnsupportedError:
    return UnsupportedError("KvgenCache", reason, is_backend=False)


def _agree(layer: KvgenLayer, query: Tensor, key: Tensor, masks: dict[str, Any]) -> None:
    """Raises ValueError where the module computes something else than the layer's spec says."""
    heads = {"q_heads": query.shape[1], "kv_heads": key.shape[1], "head_dim": query.shape[3]}
    for name, mine in {"dtype": str(query.dtype).removeprefix("torch."), **heads, **masks}.items():
        given = getattr(layer.spec.attention, name)
        if mine != given:
            advice = f": put attention: {{{name}: {str(mine).lower()}}} into the spec" if name in ("dtype", "sinks") else ""
            raise ValueError(f"layer {layer.layer_idx} runs with {name} {mine}, and attention.{name} of its spec is {given}{advice}")


def _run(layer: KvgenLayer, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, scale: float) -> Tensor:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks)):
        raise ValueError("kvgen's kernels have no gradient: call the model within torch.no_grad()")
    return layer.run(States(q, k, v, float(scale), None if sinks is None else sinks.detach().float().contiguous()), mask)


@torch.library.custom_op("kvgen::cached_attention", mutates_args=())
def cached_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, scale: float, cache: Tensor, layer: int
) -> Tensor:
    """Attention of a layer in a compiled model; tensors are [batch, tokens, heads, head_dim].

    The cache is named by a number in a tensor, so that a model is compiled once for all caches. Its tensors are no arguments: what torch
    does not see, it does not copy. The order of layers follows from their data.
    """
    return _run(layer_of(cache, layer), q, k, v, mask, sinks, scale)


@cached_attention.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)
