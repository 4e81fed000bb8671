"""Tensors of GPTQ, AWQ and compressed-tensors: the codes, scales and zeros that they hold, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvgen.errors import UnsupportedError
from kvgen.integrations.weights import Checkpoint, Weight, awq, compressed, gptq

N, K, GROUP = 48, 256, 128


def drawn(bits: int, groups: int = K // GROUP, zero: bool = True) -> Weight:
    """A matrix of all codes, and of zeros from 1 on: 0 cannot be written in GPTQ's first version."""
    random = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (N, K), dtype=torch.uint8, generator=random)
    zeros = torch.randint(1, 1 << bits, (N, groups), dtype=torch.uint8, generator=random) if zero else None
    return Weight(bits, codes, torch.rand(N, groups, generator=random).half() + 0.01, zeros)


def words(values: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 words along the last axis, by the formula: the element of `order[i]` is multiplied by 2^(bits * i)."""
    per = 32 // bits
    parts = values.long().view(*values.shape[:-1], -1, per)
    total = sum(parts[..., (order or tuple(range(per)))[i]] << (bits * i) for i in range(per))
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)  # type: ignore[operator, union-attr]


def matrix_of(weight: Weight) -> Tensor:
    """The matrix, float32 [n, k]."""
    codes = weight.codes.view(len(weight.codes), weight.scales.shape[1], -1).float()
    return (weight.scales.float().unsqueeze(-1) * (codes - zeros_of(weight).float().unsqueeze(-1))).flatten(1)


def zeros_of(weight: Weight) -> Tensor:
    found = weight.with_zeros().zeros
    assert found is not None
    return found


def as_gptq(weight: Weight, v2: bool = False) -> dict[str, Tensor]:
    stored = (zeros_of(weight).long() - int(not v2)) % (1 << weight.bits)
    packed = {"qweight": words(weight.codes, weight.bits).T.contiguous(), "qzeros": words(stored.T, weight.bits)}
    k = weight.codes.shape[1]
    return {**packed, "scales": weight.scales.T.contiguous(), "g_idx": (torch.arange(k) * weight.scales.shape[1] // k).int()}


def as_awq(weight: Weight) -> dict[str, Tensor]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    packed = {name: words(x.T, 4, order) for name, x in (("qweight", weight.codes), ("qzeros", zeros_of(weight)))}
    return {**packed, "scales": weight.scales.T.contiguous()}


def as_compressed(weight: Weight) -> dict[str, Tensor]:
    tensors = {
        "weight_packed": words(weight.codes, weight.bits),
        "weight_scale": weight.scales,
        "weight_shape": torch.tensor(weight.codes.shape),
    }
    if weight.zeros is not None:
        tensors["weight_zero_point"] = words(weight.zeros.T, weight.bits).T.contiguous()
    return tensors


def assert_same(found: Weight, wanted: Weight) -> None:
    assert (found.bits, found.group, found.codes.dtype) == (wanted.bits, wanted.group, torch.uint8)
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.scales, wanted.scales)
    assert (found.zeros is None) == (wanted.zeros is None)
    assert found.zeros is None or wanted.zeros is None or torch.equal(found.zeros, wanted.zeros)


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_tensors_of_the_public_layouts_hold_their_codes(bits: int, zero: bool) -> None:
    for groups in (1, K // GROUP):
        wanted = drawn(bits, groups, zero)
        assert_same(gptq(**as_gptq(wanted)), wanted)
        assert_same(gptq(**as_gptq(wanted, v2=True), v2=True), wanted)
        assert_same(compressed(**as_compressed(wanted)), wanted)
        if bits == 4:
            assert_same(awq(**as_awq(wanted)), wanted)


def test_a_zero_point_of_compressed_tensors_may_be_signed_bytes() -> None:
    wanted = drawn(4)
    signed = (zeros_of(wanted).int() - 8).to(torch.int8)
    assert_same(compressed(**{**as_compressed(wanted), "weight_zero_point": signed}), wanted)


def test_groups_are_repeated_without_another_matrix() -> None:
    row = drawn(4, 1)
    assert torch.equal(matrix_of(row.in_groups(64)), matrix_of(row))
    assert row.in_groups(64).group == 64
    with pytest.raises(ValueError, match="groups of 128 channels are not made of groups of 96"):
        drawn(4).in_groups(96)


def test_what_does_not_fit_is_named() -> None:
    tensors = as_gptq(drawn(4))
    shuffled = {**tensors, "g_idx": tensors["g_idx"][torch.randperm(K, generator=torch.Generator().manual_seed(0))]}
    with pytest.raises(UnsupportedError, match="order of their groups .g_idx: act-order, desc_act"):
        gptq(**shuffled)
    with pytest.raises(UnsupportedError, match="qzeros has 2 bits for an element"):
        gptq(**{**tensors, "qzeros": tensors["qzeros"][:, :3]})
    with pytest.raises(ValueError, match=r"qweight of shape \[256, 3\] does not fit scales \[2, 48\]"):
        awq(**{**as_awq(drawn(4)), "qweight": as_awq(drawn(4))["qweight"][:, :3]})
    with pytest.raises(ValueError, match=r"weight_scale of shape \[47, 2\] does not fit"):
        compressed(**{**as_compressed(drawn(4)), "weight_scale": drawn(4).scales[1:]})


LAYER = "model.layers.0.mlp.up_proj"
PACKED = {"format": "pack-quantized", "config_groups": {"group_0": {"weights": {"num_bits": 4}, "input_activations": None}}}


def folder_of(folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any]) -> Path:
    save_file = pytest.importorskip("safetensors.torch").save_file
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": quantization}))
    save_file(
        {**{f"{LAYER}.{name}": x.contiguous() for name, x in tensors.items()}, f"{LAYER}.bias": torch.ones(N)}, folder / "one.safetensors"
    )
    save_file({"model.norm.weight": torch.ones(8)}, folder / "two.safetensors")
    return folder


@pytest.mark.parametrize(
    ("tensors", "quantization"),
    [
        (as_gptq(drawn(4)), {"quant_method": "gptq"}),
        (as_gptq(drawn(4), v2=True), {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}),
        (as_awq(drawn(4)), {"quant_method": "awq", "version": "gemm"}),
        (as_compressed(drawn(4)), {"quant_method": "compressed-tensors", **PACKED}),
    ],
    ids=["gptq", "gptq_v2", "awq", "compressed-tensors"],
)
def test_a_folder_says_what_its_tensors_are(tensors: dict[str, Tensor], quantization: dict[str, Any], tmp_path: Path) -> None:
    found = Checkpoint(folder_of(tmp_path, tensors, quantization))
    assert found.quantized == (LAYER,)
    assert set(found.plain) == {f"{LAYER}.bias", "model.norm.weight"}
    assert_same(found.weight(LAYER), drawn(4))


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
        ({"quant_method": "compressed-tensors", **PACKED, "format": "nvfp4-pack-quantized"}, "format nvfp4-pack-quantized"),
        ({"quant_method": "compressed-tensors", **PACKED, "config_groups": {"g": {"input_activations": {"num_bits": 8}}}}, "input_activ"),
        ({"quant_method": "compressed-tensors", **PACKED, "transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    ],
)
def test_quantization_that_is_not_read_is_refused_by_name(quantization: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=named):
        Checkpoint(folder_of(tmp_path, {}, quantization))


def test_a_layer_that_is_refused_is_named(tmp_path: Path) -> None:
    tensors = as_gptq(drawn(4))
    found = Checkpoint(folder_of(tmp_path, {**tensors, "g_idx": tensors["g_idx"].flip(0)}, {"quant_method": "gptq", "desc_act": True}))
    with pytest.raises(UnsupportedError, match=rf"{LAYER}: channels are not in the order"):
        found.weight(LAYER)
    del tensors["scales"]
    with pytest.raises(ValueError, match=rf"lacks {LAYER}\.scales"):
        Checkpoint(folder_of(tmp_path, tensors, {"quant_method": "gptq"})).weight(LAYER)
