"""The specs of a model's layers: the format is the caller's, heads and masks are those of the model's Hugging Face configuration.

A configuration is the mapping in a `config.json`. Nothing here imports torch or transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvgen.errors import KvgenError, SpecError, SpecIssue, UnsupportedError
from kvgen.spec.issues import closest
from kvgen.spec.load import load_spec
from kvgen.spec.model import KernelSpec
from kvgen.spec.presets import overlaid

Config = Mapping[str, Any]
Format = KernelSpec | Mapping[str, Any] | str | Path
"""What a spec is loaded from; a mapping may leave `attention` out."""

FULL, SLIDING = "full_attention", "sliding_attention"
MOST = 1 << 16
"""Layers, heads or channels that a configuration may name."""


def _model(model_type: str, layers: int, q_heads: int, kv_heads: int, head_dim: int = 128, **more: Any) -> dict[str, Any]:
    heads = {"num_attention_heads": q_heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    return {"model_type": model_type, "num_hidden_layers": layers, **heads, "dtype": "bfloat16", **more}


MODELS: dict[str, dict[str, Any]] = {
    "llama-2-7b": _model("llama", 32, 32, 32, dtype="float16"),
    "llama-3.1-8b": _model("llama", 32, 32, 8),
    "llama-3.1-70b": _model("llama", 80, 64, 8),
    "mistral-7b": _model("mistral", 32, 32, 8, sliding_window=None),
    "qwen3-8b": _model("qwen3", 36, 32, 8),
    "qwen3-14b": _model("qwen3", 40, 40, 8),
    "qwen3-32b": _model("qwen3", 64, 64, 8),
    "gpt-oss-20b": _model("gpt_oss", 24, 64, 8, 64, sliding_window=128),
    "gpt-oss-120b": _model("gpt_oss", 36, 64, 8, 64, sliding_window=128),
}
"""Configurations by name, as far as they decide the cache. `mistral-7b` is version 0.2 and newer, which has no window."""

_NESTED = ("text_config", "llm_config", "language_config")
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "q_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim", "kv_channels"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
}
"""Names that families of models have for one fact."""
_DEFAULTS: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "exaone4": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "falcon": {"multi_query": True},
    "gemma2": {"sliding_window": 4096, "sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 256},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
    },
    "gpt_bigcode": {"multi_query": True},
    "gpt_oss": {"sliding_window": 128, "sliding_window_pattern": 2},
    "mistral": {"sliding_window": 4096},
    "olmo3": {"sliding_window": 4096, "sliding_window_pattern": 4},
}
"""By model type, what a `config.json` may leave out because transformers' class says it."""
_QWEN = {"use_sliding_window": False, "max_window_layers": 28}
"""The same for every model type that begins with qwen."""
_SCALE_1 = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
"""Model types that scale no scores, though their configurations do not say so."""
_CAUSAL = ("gpt_neox", "gpt_neox_japanese")
"""Model types that are decoders, though transformers' class says is_decoder: false."""
WITH_SINKS = ("flint", "gpt_oss", "granite_swa", "granitemoe_swa")
"""Model types whose layers have a learned logit per query head; configurations do not say so, and for other models the spec does."""
_LATENT = "latent attention (MLA)"
_FOR_LATENT = (
    ": it caches one latent vector (kv_lora_rank) and one rotary key (qk_rope_head_dim) per token for all heads, so it needs a cache of "
    "one operand whose K, of 576 channels for instance, has V as its first 512"
)
_ALIBI = "ALiBi (a bias of the scores)"
_NOT_CAUSAL = "attention that is not causal"
_REFUSED_TYPES = {
    "bloom": _ALIBI,
    "mpt": _ALIBI,
    "diffllama": "differential attention",
    "cpmant": "a position bias of the scores",
    "doge": "attention with a learned mask",
    "recurrent_gemma": "recurrent layers",
    "reformer": "hashed attention",
    "xlnet": "two-stream attention",
    "xlstm": "recurrent layers",
    "llama4_text": "chunked attention",
}
_REFUSED_FIELDS = {
    "is_encoder_decoder": "an encoder and a decoder (encoder-decoder), and kvgen caches causal self-attention alone",
    "kv_lora_rank": _LATENT,
    "num_kv_shared_layers": "layers that share K and V of others",
    "use_cla": "layers that share K and V of others",
    "alibi": _ALIBI,
    "use_alibi": _ALIBI,
    "cross_attention_layers": "layers of cross-attention",
    "attention_types": "local attention by a list of its own (attention_types)",
    "dense_attention_every_n_layers": "block-sparse attention",
    "index_topk": "sparse attention by an index",
    "index_topk_blocks": "sparse attention by an index",
}
"""Fields that, where they are set, say what kvgen has not."""
_RECURRENT = re.compile(r"(mamba|ssm|rwkv|linear_(num|key|value|conv)|hybrid_override_pattern|conv_L_cache|state_size)")
"""Fields of layers with a recurrent state, where no layer_types say which layers have one."""


@dataclass(frozen=True)
class LayerFacts:
    """What a model's configuration says of the attention of a layer; the fields of `attention` in a spec."""

    q_heads: int
    kv_heads: int
    head_dim: int
    softcap: float
    window: int | None
    sinks: bool


@dataclass(frozen=True)
class Layers:
    """A model's layers."""

    model_type: str
    kinds: tuple[str, ...]
    """The type of every layer: `full_attention` or `sliding_attention`."""
    facts: tuple[LayerFacts, ...]
    dtype: str | None
    """Of the weights; None where the configuration does not say."""
    scale: float | None
    """What scores are multiplied by, if it is not 1/√head_dim: an argument of calls, which no spec has."""


def known_config(text: str) -> Config:
    """The configuration of a model's name, of a `config.json` or its folder, or of LAYERSxQ_HEADS/KV_HEADSxHEAD_DIM.

    Raises KvgenError for what is none of these, SpecError for a file that cannot be read.
    """
    known = MODELS.get(text.lower())
    if known is not None:
        return known
    path = Path(text)
    if path.is_dir() or path.suffix == ".json" or path.exists():
        return read_config(path)
    match = re.fullmatch(r"(\d{1,4})x(\d{1,4})/(\d{1,4})x(\d{1,4})", text)
    if match is None or not int(match[1]):
        raise KvgenError(
            f"{text!r:.200} is neither a config.json, nor its folder, nor layers x query heads / KV heads x head_dim, like 32x32/8x128, "
            f"nor one of {', '.join(MODELS)}"
        )
    return _model("model", *map(int, match.groups()), dtype="float16")


def read_config(path: Path) -> Config:
    """The mapping in a `config.json`, or in that of a folder. Raises SpecError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise SpecError([SpecIssue("", f"cannot read the file: {error.strerror or error}")], str(file)) from None
    except (ValueError, RecursionError) as error:
        raise SpecError([SpecIssue("", f"no model's configuration: {error!s:.200}")], str(file)) from None
    if not isinstance(config, dict):
        raise SpecError([SpecIssue("", "no model's configuration: a config.json is a mapping")], str(file))
    return config


def layers_of(config: Config) -> Layers:
    """What a configuration says of a model's layers. Raises UnsupportedError, by name, for what kvgen does not compute."""
    text, outer = config, config
    while inner := next((text[name] for name in _NESTED if isinstance(text.get(name), Mapping)), None):
        _refuse_fields(text)
        outer, text = text, inner
    model = str(text.get("model_type") or outer.get("model_type") or "model")
    text = {**_DEFAULTS.get(model, _QWEN if model.startswith("qwen") else {}), **text}
    try:
        _refuse(model, text)
        kinds = _kinds(model, text, _number(model, text, "layers"))
        facts = tuple(_facts(model, {**text, **_own(model, text, layer)}, kind) for layer, kind in enumerate(kinds))
        dtype = next((one[name] for one in (text, outer) for name in ("dtype", "torch_dtype") if one.get(name)), None)
        return Layers(
            model, tuple(kinds), facts, None if dtype is None else str(dtype).removeprefix("torch."), _scale(model, text, facts[0])
        )
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise _refusal(
            model, f"a value of the model's configuration is of another kind than those of transformers: {error!s:.200}"
        ) from error


def layer_specs(
    config: Config,
    spec: Format | Mapping[str, Format] | Sequence[Format],
    *,
    batch: int = 1,
    max_len: int = 4096,
    dtype: str = "float16",
) -> list[KernelSpec]:
    """The spec of every layer of a model with this configuration.

    `spec` is one format for all layers, formats by layer type (`full_attention`, `sliding_attention`), or a sequence with one for each
    layer. A format is what `kvgen.load_spec` takes, or a mapping without heads (`key`, `value`, `cache`, or a `preset`). A mapping for all
    layers may have `ends`, what differs in so many first and last layers: `{preset: bitdecoding-int4, ends: {layers: 2, key: {bits: 8}}}`.
    Heads, soft cap, window and the sinks of gpt-oss (`WITH_SINKS`) come from the configuration; of other models with sinks the format has
    to say so (`attention.sinks`). The dtype is the format's; of a mapping without one, the configuration's, and `dtype` where it has none.
    A mapping without workloads is for `batch` sequences of `max_len` tokens.

    Raises UnsupportedError for layers that are no causal attention, ValueError where a format contradicts the configuration and for an
    unknown layer type, SpecError for formats with mistakes.
    """
    layers = layers_of(config)
    formats = _by_layer(spec, layers.kinds)
    base = {"name": spec_name(layers.model_type), "workloads": [{"batch": batch, "kv_len": max_len}]}
    made: dict[tuple[int, LayerFacts], KernelSpec] = {}
    for layer, (form, fact) in enumerate(zip(formats, layers.facts, strict=True)):
        if (id(form), fact) not in made:
            made[id(form), fact] = _spec_of(layer, fact, form, base, layers.dtype or dtype)
    return [made[id(form), fact] for form, fact in zip(formats, layers.facts, strict=True)]


def spec_name(text: str) -> str:
    """A spec's name out of any text."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", text).strip(".-")[:80].rstrip(".-") or "model"


def _refusal(model: str, reason: str) -> UnsupportedError:
    return UnsupportedError(model, reason, is_backend=False)


def _refuse(model: str, config: Config) -> None:
    """Raises UnsupportedError for a model whose cache kvgen does not hold."""
    _refuse_fields(config)
    reason = _REFUSED_TYPES.get(model)
    if model == "llama4_text" and config.get("layer_types"):
        reason = None  # the types say which layers are chunked
    inner = config.get("attn_config")
    if isinstance(inner, Mapping) and inner.get("alibi"):
        reason = _ALIBI
    position = str(config.get("position_embedding_type"))
    if position == "alibi" or position.startswith("relative"):
        reason = _ALIBI if position == "alibi" else f"scores with a relative position ({position})"
    if config.get("use_bidirectional_attention") in (True, "all"):
        reason = f"{_NOT_CAUSAL} (use_bidirectional_attention)"
    if config.get("is_decoder") is False and model not in _CAUSAL:
        reason = f"{_NOT_CAUSAL} (is_decoder is false)"
    if any(str(name).endswith("ForMaskedLM") for name in config.get("architectures") or ()):
        reason = f"{_NOT_CAUSAL} (a masked language model)"
    if config.get("attention_chunk_size") and not config.get("layer_types"):
        reason = "chunked attention"
    if reason is None and not config.get("layer_types"):
        field = next((name for name, value in config.items() if value and _RECURRENT.match(name)), None)
        if field is not None or model.startswith(("mamba", "rwkv")):
            reason = f"layers with a recurrent state{f' ({field})' if field else ''}: linear attention, Mamba or convolution"
    if reason is not None:
        raise _refusal(model, f"the model has {reason}, which kvgen has not")
    widths = config.get("v_head_dim"), config.get("head_dim")
    if None not in widths and widths[0] != widths[1]:
        raise _refusal(model, f"V has {widths[0]} channels per head and K {widths[1]}, and kvgen's caches have as many of both")


def _refuse_fields(config: Config) -> None:
    for field, meaning in _REFUSED_FIELDS.items():
        if config.get(field):
            model = str(config.get("model_type") or "model")
            raise _refusal(
                model,
                f"the model has {meaning}"
                + ("" if field == "is_encoder_decoder" else f", which kvgen has not{_FOR_LATENT if meaning == _LATENT else ''}"),
            )


def _own(model: str, config: Config, layer: int) -> dict[str, Any]:
    """What the configuration says of one layer alone."""
    own = config.get("per_layer_config")
    if own:
        return dict({int(number): facts for number, facts in own.items()}.get(layer) or {})
    heads, kinds = config.get("num_attention_heads_per_layer"), config.get("layer_types")
    if heads:
        return {"num_attention_heads": heads[layer]}
    if model in _SCALE_1 and kinds and kinds[layer] == FULL:  # Gemma 4's config.json
        heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
        return {"head_dim": config.get("global_head_dim") or 512, **({"num_key_value_heads": heads} if heads else {})}
    return {}


def _kinds(model: str, config: Config, number: int) -> list[str]:
    """The type of every layer."""
    kinds = config.get("layer_types")
    if kinds is not None:
        kinds = [FULL if kind == "attention" else str(kind) for kind in kinds]
        for layer, kind in enumerate(kinds):
            if kind not in (FULL, SLIDING):
                raise _refusal(model, f"layer {layer} of {model} is of type {kind:.60}, and kvgen has {FULL} and {SLIDING}")
        if len(kinds) < number:
            raise _refusal(model, f"the model has {number} layers, and layer_types names {len(kinds)}")
        return kinds[:number]
    if config.get("sliding_window") is None or not config.get("use_sliding_window", True):
        return [FULL] * number
    pattern = config.get("sliding_window_pattern")
    if pattern is not None:
        if not isinstance(pattern, int) or pattern < 1:
            raise _refusal(model, f"sliding_window_pattern is {pattern!r:.60}, and not the number of layers of which the last one is full")
        return [SLIDING if (layer + 1) % pattern else FULL for layer in range(number)]
    full = (config.get("max_window_layers") or 0) if "use_sliding_window" in config else 0
    return [SLIDING if layer >= full else FULL for layer in range(number)]


def _number(model: str, config: Config, what: str) -> int:
    """A fact of `_NAMES`. Raises UnsupportedError where it is absent, or no number: one for each layer, for instance."""
    names = _NAMES[what]
    value = next((config[name] for name in names if config.get(name) is not None), None)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
        said = "absent" if value is None else f"{value!r:.60}"
        raise _refusal(model, f"{names[0]} is {said} in the model's configuration, and a number from 1 to {MOST} is needed")
    return value


def _facts(model: str, config: Config, kind: str) -> LayerFacts:
    heads = _number(model, config, "q_heads")
    shared = config.get("multi_query") and not config.get("new_decoder_architecture")
    given = [config[name] for name in _NAMES["kv_heads"] if config.get(name) is not None]
    inner = config.get("attn_config")
    if isinstance(inner, Mapping) and inner.get("kv_n_heads"):  # DBRX
        given = [inner["kv_n_heads"]]
    if config.get("multi_query_attention"):
        given = [config.get("multi_query_group_num")]
    kv_heads = 1 if shared else _number(model, {"num_key_value_heads": given[0]}, "kv_heads") if given else heads
    if any(config.get(name) is not None for name in _NAMES["head_dim"]):
        head_dim = _number(model, config, "head_dim")
    else:
        head_dim = _number(model, config, "hidden") // heads
    window = config["sliding_window"] if kind == SLIDING else None
    if kind == SLIDING and not isinstance(window, int):
        raise _refusal(model, f"sliding_window is {window!r:.60} in the model's configuration, and a number is needed")
    softcap = float(config.get("attn_logit_softcapping") or 0.0)
    return LayerFacts(heads, kv_heads, head_dim, softcap, window, model in WITH_SINKS)


def _scale(model: str, config: Config, facts: LayerFacts) -> float | None:
    scale: float | None = config.get("attention_multiplier")  # Granite
    if config.get("query_pre_attn_scalar"):
        scale = float(config["query_pre_attn_scalar"]) ** -0.5
    if model in _SCALE_1:
        scale = 1.0
    return None if scale is None or abs(scale - facts.head_dim**-0.5) < 1e-9 else float(scale)


def _by_layer(spec: Format | Mapping[str, Format] | Sequence[Format], kinds: Sequence[str]) -> list[Format]:
    if isinstance(spec, Mapping) and "ends" in spec:
        ends: Any = spec["ends"]
        inner: dict[str, Any] = {name: value for name, value in spec.items() if name != "ends"}
        count = ends.get("layers") if isinstance(ends, Mapping) else None
        if not isinstance(ends, Mapping) or not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= len(kinds) // 2:
            raise ValueError(f"ends.layers is a number from 1 to {len(kinds) // 2}, of first and of last layers of {len(kinds)}")
        outer: Format = overlaid(inner, {name: value for name, value in ends.items() if name != "layers"})
        return [outer] * count + [inner] * (len(kinds) - 2 * count) + [outer] * count
    if isinstance(spec, Mapping):  # layer types, misspelt perhaps, are no fields of a spec
        kinds_named = [key for key in map(str, spec) if key.endswith("_attention") or closest(key, (FULL, SLIDING), 0.8)]
        unknown = [key for key in spec if kinds_named and key not in (FULL, SLIDING)]
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


CALLER = "the layers of a model give queries and K as its rotary embedding makes them, which rotates nothing"


def _spec_of(layer: int, facts: LayerFacts, form: Format, base: Mapping[str, Any], dtype: str) -> KernelSpec:
    if not isinstance(form, (KernelSpec, Mapping)):
        form = load_spec(form)
    data: dict[str, Any] = form.to_json() if isinstance(form, KernelSpec) else dict(form)
    attention = dict(data.get("attention") or {})
    facts = replace(facts, sinks=facts.sinks or bool(attention.get("sinks")))
    for name, fact in asdict(facts).items():
        given = attention.get(name)
        if given and given != fact:  # None, 0 and False leave it to the configuration
            raise ValueError(f"layer {layer}: attention.{name} of the spec is {given}, and {fact} in the model's configuration")
    spec = load_spec({**base, **data, "attention": {"dtype": dtype, **attention, **asdict(facts)}})
    if spec.key.rotate is not None and spec.key.rotate.applied == "caller":
        raise _refusal("key.rotate.applied: caller", CALLER)
    return spec
