"""Specs of a model's layers, from the contents of real `config.json` files and from transformers' own classes."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvgen.errors import KvgenError, SpecError, UnsupportedError
from kvgen.spec import dump_spec, load_spec
from kvgen.spec.layers import FULL, MODELS, SLIDING, LayerFacts, known_config, layer_specs, layers_of, read_config

S, F = SLIDING, FULL
LLAMA = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16"}
QWEN25 = {
    "model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "max_window_layers": 28, "sliding_window": 131072, "use_sliding_window": False, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA3 = {"hidden_size": 2560, "model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024}
FALCON = {"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32, "torch_dtype": "bfloat16"}
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}  # fmt: skip

CONFIGS: dict[str, tuple[dict[str, Any], list[str], LayerFacts, str | None, float | None]] = {
    "Llama-3.1-8B": ({"model_type": "llama", **LLAMA}, [F] * 32, LayerFacts(32, 8, 128, 0.0, None, False), "bfloat16", None),
    "Qwen2.5-7B": (QWEN25, [F] * 28, LayerFacts(28, 4, 128, 0.0, None, False), "bfloat16", None),
    "Qwen2.5-7B with a window": (
        {**QWEN25, "use_sliding_window": True, "sliding_window": 32768, "max_window_layers": 20},
        [F] * 20 + [S] * 8, LayerFacts(28, 4, 128, 0.0, None, False), "bfloat16", None,
    ),
    "Mistral-7B-v0.1": (
        {"model_type": "mistral", **LLAMA, "sliding_window": 4096},
        [S] * 32, LayerFacts(32, 8, 128, 0.0, 4096, False), "bfloat16", None,
    ),
    "Gemma 2 27B": (
        {
            "model_type": "gemma2", "head_dim": 128, "hidden_size": 4608, "num_attention_heads": 32, "num_hidden_layers": 46,
            "num_key_value_heads": 16, "sliding_window": 4096, "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 144,
            "torch_dtype": "bfloat16",
        },
        [S, F] * 23, LayerFacts(32, 16, 128, 50.0, 4096, False), "bfloat16", 1 / 12,
    ),
    "Gemma 3 27B": (
        {
            "model_type": "gemma3", "torch_dtype": "bfloat16",
            "text_config": {**GEMMA3, "head_dim": 128, "hidden_size": 5376, "num_attention_heads": 32, "num_hidden_layers": 62,
                            "num_key_value_heads": 16, "query_pre_attn_scalar": 168},
        },
        ([S] * 5 + [F]) * 10 + [S] * 2, LayerFacts(32, 16, 128, 0.0, 1024, False), "bfloat16", 168**-0.5,
    ),
    "gpt-oss-20b": (
        {
            "model_type": "gpt_oss", "head_dim": 64, "hidden_size": 2880, "num_attention_heads": 64, "num_hidden_layers": 24,
            "num_key_value_heads": 8, "sliding_window": 128, "layer_types": [S, F] * 12, "torch_dtype": "bfloat16",
        },
        [S, F] * 12, LayerFacts(64, 8, 64, 0.0, 128, True), "bfloat16", None,
    ),
    "Phi-3-mini-4k": (
        {"model_type": "phi3", **LLAMA, "hidden_size": 3072, "num_key_value_heads": 32, "sliding_window": 2047},
        [S] * 32, LayerFacts(32, 32, 96, 0.0, 2047, False), "bfloat16", None,
    ),
    "Falcon-40B": (
        {**FALCON, "hidden_size": 8192, "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8, "alibi": False,
         "multi_query": True, "new_decoder_architecture": True},
        [F] * 60, LayerFacts(128, 8, 64, 0.0, None, False), "bfloat16", None,
    ),
    "Gemma 4 as transformers writes it": (
        {**GEMMA3, "model_type": "gemma4_text", "num_hidden_layers": 12, "layer_types": ([S] * 5 + [F]) * 2, "num_attention_heads": 8,
         "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 512, "dtype": "bfloat16", "num_kv_shared_layers": 0,
         "per_layer_config": {"05": {"head_dim": 512}, "11": {"head_dim": 512}}},
        ([S] * 5 + [F]) * 2, LayerFacts(8, 4, 256, 0.0, 512, False), "bfloat16", 1.0,
    ),
    "DBRX": (
        {"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "attn_config": {"kv_n_heads": 8}, "torch_dtype": "bfloat16"},
        [F] * 40, LayerFacts(48, 8, 128, 0.0, None, False), "bfloat16", None,
    ),
}  # fmt: skip
"""Contents of files, layer types, facts of the first layer, dtype, and scale where it is not 1/√head_dim."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DeepSeek-V3": (DEEPSEEK, r"deepseek_v3: the model has latent attention \(MLA\).*cache of one operand"),
    "T5": ({"model_type": "t5", "d_model": 512, "num_heads": 8, "num_layers": 6, "is_encoder_decoder": True}, "encoder-decoder"),
    "Llama-4-Scout": (
        {"model_type": "llama4", "text_config": {"model_type": "llama4_text", **LLAMA, "attention_chunk_size": 8192}},
        "llama4_text: the model has chunked attention",
    ),
    "Qwen3-Next": (
        {"model_type": "qwen3_next", **LLAMA, "head_dim": 256, "linear_num_value_heads": 32, "full_attention_interval": 4},
        r"qwen3_next: the model has layers with a recurrent state \(linear_num_value_heads\)",
    ),
    "its layer types": (
        {"model_type": "qwen3_next", **LLAMA, "num_hidden_layers": 2, "layer_types": ["linear_attention", F], "linear_num_value_heads": 32},
        "layer 0 of qwen3_next is of type linear_attention, and kvgen has full_attention and sliding_attention",
    ),
    "Mamba": ({"model_type": "mamba2", "hidden_size": 2560, "num_hidden_layers": 64, "state_size": 128}, "Mamba"),
    "MiMo-V2": ({"model_type": "mimo_v2", **LLAMA, "head_dim": 192, "v_head_dim": 128}, "V has 128 channels per head and K 192"),
    "BERT": ({"model_type": "bert", **LLAMA, "architectures": ["BertForMaskedLM"]}, "attention that is not causal"),
    "no heads": ({"model_type": "new", "num_hidden_layers": 2}, "num_attention_heads is absent in the model's configuration"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_the_layers_of_a_config_json(name: str) -> None:
    config, kinds, facts, dtype, scale = CONFIGS[name]
    layers = layers_of(config)
    assert list(layers.kinds) == kinds
    assert layers.facts[0] == facts
    assert {one.window is None for one, kind in zip(layers.facts, kinds, strict=True) if kind == FULL} <= {True}
    assert {one.window for one, kind in zip(layers.facts, kinds, strict=True) if kind == SLIDING} <= {config.get("sliding_window", 1024)}
    assert (layers.dtype, layers.scale) == (dtype, pytest.approx(scale) if scale else None)


@pytest.mark.parametrize("name", REFUSED)
def test_what_kvgen_has_not_is_refused_by_name(name: str) -> None:
    config, match = REFUSED[name]
    with pytest.raises(UnsupportedError, match=match):
        layers_of(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_class_says_the_same(name: str) -> None:
    """Its defaults fill what a file leaves out, and its attributes are what the model's attention reads."""
    transformers = pytest.importorskip("transformers")
    from kvgen.integrations.transformers import layer_specs as of_class

    config, kinds, facts, *_ = CONFIGS[name]
    if config["model_type"] not in transformers.CONFIG_MAPPING:
        pytest.skip("this release of transformers has no such class")
    known = transformers.AutoConfig.for_model(**config)
    form = {"key": {"bits": 8, "group": 32}, "value": {"bits": 8, "group": 16}, "attention": {"dtype": "float16"}}
    assert of_class(known, form) == layer_specs(config, form)
    text = known.get_text_config(decoder=True)
    if getattr(text, "layer_types", None):
        assert text.layer_types == kinds
        assert text.sliding_window == next((one.window for one in layers_of(config).facts if one.window), None) or S not in kinds
    assert text.num_attention_heads == facts.q_heads
    if "per_layer_config" not in config:
        assert (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads) == facts.head_dim


@pytest.mark.parametrize("value", [True, -1, 10**12, "text", [1], {"a": 1}, None])
def test_values_of_another_kind_are_refused_or_left_out_but_never_crash(value: object) -> None:
    config = CONFIGS["Gemma 4 as transformers writes it"][0]
    for field in config:
        with suppress(UnsupportedError):
            layers_of({**config, field: value})


@pytest.mark.parametrize("name", MODELS)
def test_models_known_by_name_are_configurations(name: str) -> None:
    specs = layer_specs(known_config(name.upper()), {"preset": "kivi-int2"})
    assert len(specs) == MODELS[name]["num_hidden_layers"]
    assert all(load_spec(dump_spec(spec)) == spec for spec in dict.fromkeys(specs))
    if name.startswith("gpt-oss"):
        assert [(one.attention.window, one.attention.sinks) for one in specs] == [(128, True), (None, True)] * (len(specs) // 2)
    else:
        assert {(one.attention.window, one.attention.sinks) for one in specs} == {(None, False)}


def test_a_shape_is_a_configuration() -> None:
    config = known_config("32x40/8x128")
    assert layers_of(config).facts == (LayerFacts(40, 8, 128, 0.0, None, False),) * 32
    for wrong in ("llama", "32x8x128", "0x8/8x128", "32x32/8x128x"):
        with pytest.raises(KvgenError, match="neither a config.json, nor its folder, nor layers x query heads"):
            known_config(wrong)


def test_a_file_or_its_folder_is_read_also_through_a_link(tmp_path: Path) -> None:
    config = CONFIGS["gpt-oss-20b"][0]
    (tmp_path / "blob").write_text(json.dumps(config))
    (tmp_path / "config.json").symlink_to("blob")  # as in the cache of the hub
    assert read_config(tmp_path) == read_config(tmp_path / "config.json") == known_config(str(tmp_path)) == config


@pytest.mark.parametrize("content", ["[1]", "{", "[" * 100_000])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(SpecError, match="no model's configuration"):
        read_config(tmp_path)
    with pytest.raises(SpecError, match="cannot read the file"):
        read_config(tmp_path / "none.json")
