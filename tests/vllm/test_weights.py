"""`--quantization kvgen`: a model with packed weights beside the same one whose weights are dequantized beforehand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm.lora.request import LoRARequest

from kvgen.errors import UnsupportedError
from kvgen.format import weights
from kvgen.integrations.weights import Weight
from kvgen.spec.model import LinearFormat
from tests.unit.integrations.test_weights import as_awq, as_compressed, as_gptq, matrix_of
from tests.vllm.conftest import write_model
from tests.vllm.engines import SAW, Engines, generate, ids, same

PROMPTS = [ids(n, n) for n in (5, 120, 257)]
"""The longest is more rows than kernels are compiled for."""
LIMIT = 0.001
"""Of log-probabilities: a CPU's kernels take x as integers of 16 bits."""
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {"input_activations": None}}}
FORM: dict[str, Any] = {"bits": 4, "group": 64, "zero": True}
SYMMETRIC = FORM | {"zero": False}
METHODS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "gptq": (as_gptq, {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}, FORM),
    "gptq-symmetric": (as_gptq, {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}, SYMMETRIC),
    "awq": (as_awq, {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 64, "zero_point": True}, FORM),
    "compressed": (as_compressed, PACKED, FORM),
    "compressed-row": (as_compressed, PACKED, {"bits": 8, "group": "row", "zero": False}),
}
"""The layout of a checkpoint's tensors, its configuration, and the form of its weights."""


def quantized(matrix: Tensor, **form: Any) -> Weight:
    """The nearest codes of a matrix."""
    n, k = matrix.shape
    linear = LinearFormat(n=n, k=k, dtype="float32", **form)
    return Weight(linear.bits, *weights.quantize(linear, matrix))


def is_product(name: str) -> bool:
    return name.endswith("_proj.weight")


def dequantized(model: Path, folder: Path, head: dict[str, Any] | None = None, **form: Any) -> Path:
    """The model with the weights that their codes mean."""
    tensors = load_file(model / "model.safetensors")
    for name, x in tensors.items():
        if is_product(name):
            tensors[name] = matrix_of(quantized(x, **form))
        elif head and name == "lm_head.weight":
            tensors[name] = matrix_of(quantized(x, **head))
    return written(model, folder, tensors)


def written(model: Path, folder: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | changes))
    return folder


def stored(model: Path, folder: Path, method: str) -> Path:
    """The model as another library's checkpoint; its last layer stays in 16 bits."""
    layout, about, form = METHODS[method]
    tensors = {}
    for name, x in load_file(model / "model.safetensors").items():
        if is_product(name) and ".layers.1." not in name:
            parts = layout(quantized(x, **form))
            tensors |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
        else:
            tensors[name] = x
    return written(model, folder, tensors, quantization_config=about)


def options(**given: Any) -> dict[str, Any]:
    return {"quantization": "kvgen", "additional_config": {"kvgen_weights": given}}


@pytest.mark.parametrize("form", [None, {"bits": 8, "group": "row", "zero": True}], ids=["default", "w8"])
def test_weights_of_16_bits_are_packed_when_they_are_loaded(engine: Engines, model: Path, tmp_path: Path, form: Any) -> None:
    """In all layers but the head, prompts and decode steps alike; merged layers are one product."""
    right, _ = generate(engine(dequantized(model, tmp_path, **(form or {})), None), PROMPTS)
    llm = engine(model, None, quantization="kvgen") if form is None else engine(model, None, **options(**form))
    found, _ = generate(llm, PROMPTS)
    same(found, right, LIMIT)
    assert [name.split(".")[-2] for name in packed(llm)] == ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"] * 2


def packed(llm: Any) -> dict[str, int]:
    """The addresses of packed weights."""
    found: list[dict[str, int]] = llm.apply_model(
        lambda module: {name: x.data_ptr() for name, x in module.named_buffers() if "packed" in name}
    )
    return found[0]


def test_weights_are_loaded_again_into_the_memory_that_graphs_read(engine: Engines, model: Path, tmp_path: Path) -> None:
    llm = engine(stored(model, tmp_path, "gptq"), None, quantization="kvgen")
    (right, _), before = generate(llm, PROMPTS, 4), packed(llm)
    llm.apply_model(lambda module: [x.zero_() for name, x in module.named_buffers() if "packed" in name])
    llm.collective_rpc("reload_weights")
    assert llm.reset_prefix_cache()
    same(generate(llm, PROMPTS, 4)[0], right)
    assert packed(llm) == before


def test_adapters_are_added_to_products(engine: Engines, model: Path, tmp_path: Path) -> None:
    """LoRA, whose layers vLLM puts around those with packed weights."""
    base, adapter, random = dequantized(model, tmp_path / "base"), {}, torch.Generator().manual_seed(0)
    tensors = load_file(base / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "down_proj.weight"))]:
        n, k = tensors[name].shape
        a, b = torch.randn(8, k, generator=random) / k**0.5, torch.randn(n, 8, generator=random) / 8
        tensors[name] += 2 * b @ a
        adapter |= {f"base_model.model.{name.removesuffix('.weight')}.lora_{part}.weight": x for part, x in (("A", a), ("B", b))}
    about = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj"], "bias": "none"}
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(about))
    save_file(adapter, tmp_path / "adapter" / "adapter_model.safetensors")

    right, _ = generate(engine(written(model, tmp_path / "right", tensors), None), PROMPTS, 4)
    llm = engine(model, None, quantization="kvgen", enable_lora=True, max_lora_rank=8)
    found, _ = generate(llm, PROMPTS, 4, lora_request=LoRARequest("adapter", 1, str(tmp_path / "adapter")))
    same(found, right, LIMIT)


def test_the_head_has_8_bits_beside_kvgens_cache_in_compiled_code(engine: Engines, model: Path, tmp_path: Path) -> None:
    head = {"bits": 8, "group": 128}
    cache = {"kvgen": SAW}
    right, _ = generate(engine(dequantized(model, tmp_path, head), SAW), PROMPTS, 8)
    both = {"quantization": "kvgen", "additional_config": {**cache, "kvgen_weights": {"head": head}}}
    found, _ = generate(engine(model, SAW, **both, enforce_eager=False), PROMPTS, 8)
    same(found, right, LIMIT)


@pytest.mark.parametrize("method", METHODS)
def test_checkpoints_of_other_libraries_are_served(engine: Engines, model: Path, tmp_path: Path, method: str) -> None:
    """Their codes, bit for bit; what they do not quantize stays as it is."""
    tensors = load_file(model / "model.safetensors")
    for name, x in tensors.items():
        if is_product(name) and ".layers.1." not in name:
            tensors[name] = matrix_of(quantized(x, **METHODS[method][2]))
    right, _ = generate(engine(written(model, tmp_path / "right", tensors), None), PROMPTS)
    found, _ = generate(engine(stored(model, tmp_path / method, method), None, quantization="kvgen"), PROMPTS)
    same(found, right, LIMIT)


def test_what_cannot_be_served_is_named(engine: Engines, model: Path, tmp_path: Path) -> None:
    narrow = write_model(tmp_path / "narrow", intermediate_size=192)
    with pytest.raises(UnsupportedError, match=r"model\.layers\.0\.mlp\.down_proj, \[128, 192\].*k: .*128"):
        engine(narrow, None, quantization="kvgen")
    with pytest.raises(UnsupportedError, match=r"kvgen_weights of --additional-config: .*'bit'"):
        engine(model, None, **options(bit=4))

    shuffled = load_file(stored(model, tmp_path / "gptq", "gptq") / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.g_idx"  # of one of three merged layers, and not the last
    shuffled[name] = shuffled[name].flip(0)
    with pytest.raises(UnsupportedError, match=r"layers\.0\.self_attn\.qkv_proj: channels are not in the order of their groups"):
        engine(written(tmp_path / "gptq", tmp_path / "gptq", shuffled), None, quantization="kvgen")

    broken = load_file(stored(model, tmp_path / "row", "compressed-row") / "model.safetensors")
    broken["model.layers.0.mlp.down_proj.weight_scale"][3] = torch.inf
    with pytest.raises(UnsupportedError, match=r"layers\.0\.mlp\.down_proj: scales that were not loaded, or are not finite in float32"):
        engine(written(tmp_path / "row", tmp_path / "row", broken), None, quantization="kvgen")

    mixed = load_file(stored(model, tmp_path / "awq", "awq") / "model.safetensors")
    mixed = {name: x for name, x in mixed.items() if "layers.0.mlp.up_proj" not in name}
    with pytest.raises(UnsupportedError, match=r"gate_up_proj: vLLM computes .*up_proj as one layer, .* in different formats"):
        engine(written(tmp_path / "awq", tmp_path / "awq", mixed), None, quantization="kvgen")
