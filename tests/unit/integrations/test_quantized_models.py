"""Models over packed weights: the same logits as over the weights that are meant, joint products, compiled steps, files."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvgen.integrations.weights import Weight, opened
from tests.support.models import generated, model_of, plain, random_ids
from tests.unit.integrations.test_weights import as_awq, as_compressed, as_gptq, matrix_of

pytest.importorskip("transformers")

from safetensors.torch import save_file

from kvgen.integrations.linears import JointLinear
from kvgen.integrations.transformers import DecodeLoop, load_quantized, quantize_weights, save_quantized
from kvgen.integrations.transformers.weights import GatedMLP, places

pytestmark = pytest.mark.filterwarnings("ignore::kvgen.api.FallbackWarning")
INT4 = {"bits": 4, "group": 64}
INT8 = {"bits": 8, "group": 64}
SIZES = {"intermediate_size": 128, "vocab_size": 112, "num_hidden_layers": 2}
"""Products of two shapes: 256 x 64 and 64 x 128."""
LAYER = "model.layers.1"


def small(family: str = "llama", **changed: Any) -> Any:
    return model_of(family, **{**SIZES, **changed})


@torch.no_grad()
def meant(model: Any, quantized: Any) -> Any:
    """A copy of a model in 16 bits, with the weights that its quantized twin means."""
    other = copy.deepcopy(model)
    for layer in quantized.values():
        weight = layer.dequantize()
        sources = [other.get_submodule(name) for name in layer.place.sources]
        for source, part in zip(sources, weight.split([source.out_features for source in sources]), strict=True):
            assert (source.weight - part).abs().max() < source.weight.abs().max() / 5, "codes are in other rows"
            source.weight = nn.Parameter(part)  # a tied one stays in the embeddings
    return other


def logits(model: Any, ids: Tensor) -> Tensor:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found: Tensor = model(ids).logits
    return found


def assert_close(one: Tensor, other: Tensor) -> None:
    assert (one - other).abs().max() < 1e-3 * other.abs().max(), "the CPU's kernels round activations to 16 bits"


@pytest.mark.parametrize(
    ("family", "changed"), [("llama", {}), ("gemma2", {}), ("qwen2", {})], ids=["llama", "gemma2: gelu", "qwen2: a bias of q, k and v"]
)
def test_logits_are_those_of_the_weights_that_are_meant(family: str, changed: dict[str, Any]) -> None:
    model = small(family, **changed)
    for name, bias in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(bias)
    plain_model = copy.deepcopy(model)
    found = quantize_weights(model, INT4, head=INT8)
    gate_up = f"{LAYER}.mlp.gate_up_proj"
    assert {f"{LAYER}.self_attn.qkv_proj", f"{LAYER}.self_attn.o_proj", gate_up, f"{LAYER}.mlp.down_proj", "lm_head"} <= set(found)
    assert isinstance(model.model.layers[1].mlp, GatedMLP) == (family != "gemma2")
    assert isinstance(found[gate_up], JointLinear) == (family == "gemma2")
    reference = meant(plain_model, found)
    assert_close(logits(model, random_ids(2, 9)), logits(reference, random_ids(2, 9)))
    assert {layer.wide_calls for layer in found.values()} == {0}
    assert_close(logits(model, random_ids(2, 70)), logits(reference, random_ids(2, 70)))
    assert {layer.wide_calls for layer in found.values()} == {1}, "140 rows are more than kernels are compiled for, and counted"


def test_layers_that_are_not_joined_or_skipped() -> None:
    model = small()
    each = [place.name for place in places(model, lambda name: name.startswith(LAYER), join=False)]
    assert set(each) == {f"{LAYER}.self_attn.{x}_proj" for x in "qkvo"} | {f"{LAYER}.mlp.{x}_proj" for x in ("gate", "up", "down")}
    joint = {place.name: place.layers for place in places(model, lambda name: "k_proj" not in name and "up_proj" not in name, join=True)}
    assert joint[f"{LAYER}.self_attn.qkv_proj"] == ("q_proj", "v_proj")
    assert f"{LAYER}.mlp.gate_proj" in joint
    found = quantize_weights(model, INT4, skip=["self_attn", r"layers\.0\."])
    assert set(found) == {f"{LAYER}.mlp.gate_up_proj", f"{LAYER}.mlp.down_proj"}
    assert type(model.lm_head) is nn.Linear


def test_another_input_is_multiplied_anew() -> None:
    model = small()
    joint = quantize_weights(model, INT4)[f"{LAYER}.self_attn.qkv_proj"]
    x, y = torch.randn(2, 3, 64)
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        q, other, k, v = attention.q_proj(x), attention.k_proj(y), attention.k_proj(x), attention.v_proj(x)
        whole, second = joint(x).split(joint.sizes, -1), joint(y).split(joint.sizes, -1)
    for one, wanted in zip((q, k, v, other), (*whole, second[1]), strict=True):
        assert torch.equal(one, wanted)
    assert joint.held is None


def test_what_cannot_be_quantized_is_named_before_anything_changes() -> None:
    narrow = small(intermediate_size=96)
    with pytest.raises(ValueError, match=r"layers.0.mlp.down_proj: .*64.*give it another group, or leave it as it is by skip"):
        quantize_weights(narrow, INT4)
    assert type(narrow.model.layers[0].self_attn.q_proj) is nn.Linear
    experts = small("gpt_oss", num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"layers.0.mlp.experts.gate_up_proj has .* several experts.* by skip=\['experts'\]"):
        quantize_weights(experts, INT4)
    assert set(quantize_weights(experts, INT4, skip=["experts", "layers.[12]"])) == {
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.0.self_attn.o_proj",
    }
    with pytest.raises(TypeError, match="a model of transformers is needed, not Sequential"):
        quantize_weights(nn.Sequential(nn.Linear(64, 64)), INT4)
    model = small()
    model.model.class_token = nn.Parameter(torch.zeros(1, 1, 64))  # as encoders of images have: no matrices
    quantize_weights(model, INT4, wide="refuse")
    with pytest.raises(ValueError, match="129 rows, and its kernel is compiled for 128"):
        logits(model, random_ids(1, 129))
    with pytest.raises(ValueError, match="a CPU's kernel chooses its instructions by the number of rows"):
        quantize_weights(small(), INT4, wide="invariant")
    with pytest.raises(TypeError, match="stays float32 on cpu: quantize the model where it runs"):
        model.half()
    with pytest.raises(ValueError, match="no gradient"):
        model(random_ids(1, 3))


def test_a_compiled_step_over_packed_weights_and_a_packed_cache(cache_of: Callable[..., Any]) -> None:
    model = small()
    found = quantize_weights(model, INT4, head=INT8)
    torch._dynamo.reset()
    prompts = random_ids(2, 40)
    tokens = []
    for compiled in (False, {"backend": "aot_eager"}):
        loop = DecodeLoop(model, cache_of(model, plain(4), 2), compile=compiled)
        for prompt in prompts:
            loop.add(prompt)
        tokens.append(loop.run(6))
    assert torch.equal(*tokens)
    assert all(layer.held is None for layer in found.values() if isinstance(layer, JointLinear))


def test_a_saved_model_is_the_same_and_another_version_or_device_is_refused(tmp_path: Path) -> None:
    model = small(tie_word_embeddings=True)
    quantize_weights(model, INT4)
    save_quantized(model, tmp_path)
    again = load_quantized(tmp_path, device="cpu")
    assert torch.equal(logits(again, random_ids(2, 9)), logits(model, random_ids(2, 9)))
    assert again.lm_head.weight is again.model.embed_tokens.weight
    save_quantized(again, tmp_path / "again")
    (one, about), (other, same) = (read(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "again"))
    assert about == same
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    for change, told in (({"version": 0}, "has version 0 of kvgen-weights"), ({"device": "cuda"}, "was packed for cuda")):
        altered(tmp_path / "model.safetensors", tmp_path / "again" / "model.safetensors", change)
        with pytest.raises(ValueError, match=told):
            load_quantized(tmp_path / "again", device="cpu")
    with pytest.raises(ValueError, match="no packed weights"):
        save_quantized(small(), tmp_path)


def read(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file."""
    with opened(file) as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}, tensors.metadata()  # noqa: SIM118 - no mapping


def altered(source: Path, target: Path, change: dict[str, Any]) -> None:
    """A file whose metadata say something else."""
    every, metadata = read(source)
    save_file(every, target, {**metadata, "kvgen-weights": json.dumps({**json.loads(metadata["kvgen-weights"]), **change})})


# --- checkpoints of other libraries ------------------------------------------------------------------------------------------


def rounded(weight: Tensor, zero: bool) -> Weight:
    """A quantizer of four lines: codes, scales in 16 bits, zeros."""
    parts = weight.detach().view(len(weight), -1, 64)
    low = parts.amin(-1) if zero else -parts.abs().amax(-1)
    scales = ((parts.amax(-1) if zero else -low) - low).div(15).half()
    zeros = (-low / scales.float()).round().clamp(1, 15).byte() if zero else torch.full(scales.shape, 8).byte()
    codes = (parts / scales.unsqueeze(-1).float() + zeros.unsqueeze(-1)).round().clamp(0, 15).byte().view_as(weight)
    return Weight(4, codes, scales, zeros if zero else None)


def written(model: Any, folder: Path, pack: Callable[[Weight], dict[str, Tensor]], zero: bool, about: dict[str, Any]) -> Any:
    """Write a checkpoint of a model, of which the MLPs keep 16 bits where there are zeros; its twin with the weights that are meant."""
    twin, tensors = copy.deepcopy(model), {name: x.contiguous() for name, x in model.state_dict().items()}
    for name, layer in twin.named_modules():
        if type(layer) is nn.Linear and ("self_attn" in name or ("mlp" in name and not zero)):
            weight = rounded(layer.weight, zero)
            layer.weight.data = matrix_of(weight)
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{part}": x.contiguous() for part, x in pack(weight).items()}
    (folder / "config.json").write_text(json.dumps({**model.config.to_dict(), "quantization_config": about}, default=str))
    save_file(tensors, folder / "model.safetensors")
    return twin


PACKED = {"format": "pack-quantized", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}


@pytest.mark.parametrize(
    ("pack", "zero", "about"),
    [
        (as_gptq, False, {"quant_method": "gptq", "bits": 4, "group_size": 64}),
        (as_awq, True, {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 64}),
        (as_compressed, False, {"quant_method": "compressed-tensors", **PACKED}),
    ],
    ids=["gptq", "awq with zeros", "compressed-tensors"],
)
def test_checkpoints_in_public_layouts_load(pack: Any, zero: bool, about: dict[str, Any], tmp_path: Path) -> None:
    twin = written(small(), tmp_path, pack, zero, about)
    found = load_quantized(tmp_path, device="cpu", dtype=torch.float32, head=INT8)
    assert f"{LAYER}.self_attn.qkv_proj" in dict(found.named_modules())
    quantize_weights(twin, INT4, skip=["model"], head=INT8)
    assert_close(logits(found, random_ids(2, 9)), logits(twin, random_ids(2, 9)))
    prompt = random_ids(2, 9)
    assert torch.equal(generated(found, None, prompt), generated(twin, None, prompt))
