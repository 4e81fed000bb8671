"""Which spec each layer of a model has: the format is the caller's, heads and masks are the model's configuration's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvgen.errors import UnsupportedError
from kvgen.spec import KernelSpec, load_spec
from kvgen.spec.issues import closest

Format = KernelSpec | Mapping[str, Any] | str | Path
"""What a spec is loaded from; a mapping may leave `attention` out."""

FULL, SLIDING = "full_attention", "sliding_attention"
WITH_SINKS = ("gpt_oss",)
"""Model types whose layers have a learned logit per query head; configurations do not say so, and for other models the spec does."""


@dataclass(frozen=True)
class LayerFacts:
    """What a model's configuration says of the attention of a layer."""

    q_heads: int
    kv_heads: int
    head_dim: int
    softcap: float
    window: int | None
    sinks: bool


def layer_specs(
    config: Any, spec: Format | Mapping[str, Format] | Sequence[Format], *, batch: int = 1, max_len: int = 4096
) -> list[KernelSpec]:
    """The spec of every layer of a model with this configuration.

    `spec` is one format for all layers, formats by layer type (`full_attention`, `sliding_attention`), or a sequence with one for each
    layer. A format is what `kvgen.load_spec` takes, or a mapping without heads (`key`, `value`, `cache`, or a `preset`). Heads, soft cap,
    window and the sinks of gpt-oss come from the configuration; of other models with sinks the format has to say so (`attention.sinks`).
    The dtype is the format's; of a mapping without one, the configuration's. A mapping without workloads is for `batch` sequences of
    `max_len` tokens.

    Raises UnsupportedError for layers that are no causal attention, TypeError for something else than a configuration, ValueError where a
    format contradicts the configuration and for an unknown layer type, SpecError for formats with mistakes.
    """
    if not hasattr(config, "get_text_config"):
        raise TypeError(f"config must be the model's configuration (model.config), not {type(config).__name__}")
    if getattr(config, "is_encoder_decoder", False):
        raise refusal(f"{config.model_type} is an encoder-decoder model, and kvgen caches causal self-attention alone")
    text = config.get_text_config(decoder=True)
    configs = getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers  # a model's layers may have other heads
    kinds = _layer_types(text, configs)
    formats = _by_layer(spec, kinds)
    facts = [_facts(each, kind) for each, kind in zip(configs, kinds, strict=True)]
    made: dict[tuple[int, LayerFacts], KernelSpec] = {}
    for layer, (form, fact) in enumerate(zip(formats, facts, strict=True)):
        if (id(form), fact) not in made:
            made[id(form), fact] = _spec_of(layer, fact, form, text, {"batch": batch, "kv_len": max_len})
    return [made[id(form), fact] for form, fact in zip(formats, facts, strict=True)]


def refusal(reason: str) -> UnsupportedError:
    """The error for a model, or a call of one, that needs something else of its cache than causal self-attention."""
    return UnsupportedError("KvgenCache", reason, is_backend=False)


def _layer_types(config: Any, layers: Sequence[Any]) -> list[str]:
    """The type of every layer. Raises UnsupportedError for a model whose cache kvgen does not hold."""
    for field, meaning in (("kv_lora_rank", "latent attention (MLA)"), ("num_kv_shared_layers", "layers that share K and V of others")):
        if getattr(config, field, None):
            raise refusal(f"{config.model_type} has {meaning}, which kvgen does not cache")
    kinds = getattr(config, "layer_types", None) or [SLIDING if _slides(each) else FULL for each in layers]
    for layer, kind in enumerate(kinds):
        if kind not in (FULL, SLIDING):
            raise refusal(f"layer {layer} of {config.model_type} is of type {kind}, and kvgen has {FULL} and {SLIDING}")
    return list(kinds)


def _slides(config: Any) -> bool:
    return getattr(config, "sliding_window", None) is not None and bool(getattr(config, "use_sliding_window", True))


def _by_layer(spec: Format | Mapping[str, Format] | Sequence[Format], kinds: Sequence[str]) -> list[Format]:
    if isinstance(spec, Mapping) and any(_is_kind(key) for key in spec):
        unknown = [key for key in spec if key not in (FULL, SLIDING)]
        if unknown:
            raise ValueError(f"formats by layer type have the keys {FULL} and {SLIDING}, not {unknown[0]!r}")
    if isinstance(spec, Mapping) and set(spec) <= {FULL, SLIDING}:
        missing = sorted(set(kinds) - set(spec))
        if missing:
            raise ValueError(f"the model has layers of type {missing[0]}, and the formats by layer type have none for them")
        return [spec[kind] for kind in kinds]
    if isinstance(spec, Sequence) and not isinstance(spec, str):
        if len(spec) != len(kinds):
            raise ValueError(f"the model has {len(kinds)} layers, and {len(spec)} formats were given")
        return list(spec)
    return [spec] * len(kinds)


def _is_kind(key: object) -> bool:
    """Whether a key of a mapping is a layer type, misspelt perhaps, and no field of a spec."""
    return isinstance(key, str) and (key.endswith("_attention") or closest(key, (FULL, SLIDING), 0.8) is not None)


def _facts(config: Any, kind: str) -> LayerFacts:
    heads = config.num_attention_heads
    return LayerFacts(
        q_heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        softcap=float(getattr(config, "attn_logit_softcapping", None) or 0.0),
        window=config.sliding_window if kind == SLIDING else None,
        sinks=config.model_type in WITH_SINKS,
    )


def _spec_of(layer: int, facts: LayerFacts, form: Format, config: Any, workload: Mapping[str, int]) -> KernelSpec:
    if not isinstance(form, (KernelSpec, Mapping)):
        form = load_spec(form)
    data: dict[str, Any] = form.to_json() if isinstance(form, KernelSpec) else dict(form)
    attention = dict(data.get("attention") or {})
    facts = replace(facts, sinks=facts.sinks or bool(attention.get("sinks")))
    for name, fact in asdict(facts).items():
        given = attention.get(name)
        if given and given != fact:  # None, 0 and False leave it to the configuration
            raise ValueError(f"layer {layer}: attention.{name} of the spec is {given}, and {fact} in the model's configuration")
    dtype = getattr(config, "dtype", None) or torch.get_default_dtype()
    attention = {"dtype": str(dtype).removeprefix("torch."), **attention, **asdict(facts)}
    return load_spec({"name": config.model_type.replace("_", "-"), "workloads": [dict(workload)], **data, "attention": attention})
