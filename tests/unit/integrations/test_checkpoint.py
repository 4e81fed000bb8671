"""Static scales of checkpoints: names and shapes of compressed-tensors and ModelOpt, and what does not fit a format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvgen import load_scales
from tests.support.cpu import spec_of

save_file = pytest.importorskip("safetensors.torch").save_file
HEADS = torch.tensor([0.5, 2.0])
TENSOR, HEAD, CHANNEL = (spec_of(k=f"e4m3@{kind}", v=f"e4m3@{kind}") for kind in ("tensor", "head", "channel"))
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def checkpoint(folder: Path, tensors: dict[str, torch.Tensor], scheme: dict[str, Any] | None = None) -> Path:
    """A checkpoint of two files, with other tensors in it."""
    config = {"model_type": "llama", "quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {"model.layers.0.self_attn.q_proj.weight": torch.zeros(2, 2), "model.layers.0.self_attn.q_scale": torch.ones(1)}
    for number, part in enumerate(([*tensors][::2], [*tensors][1::2])):
        save_file({**weights, **{name: tensors[name] for name in part}}, folder / f"model-{number}.safetensors")
    return folder


def named(form: str, layers: int, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """Scales of K, and twice them of V; those of layer n are n + 1 times as large."""
    each = [(layer, which) for layer in range(layers) for which in "kv"]
    return {form.format(layer, which): scale * (layer + 1) * (1 + (which == "v")) for layer, which in each}


COMPRESSED = "model.layers.{}.self_attn.{}_scale"


@pytest.mark.parametrize(
    ("form", "spec", "shape", "scheme"),
    [
        (COMPRESSED, TENSOR, (1,), SCHEME),
        (COMPRESSED, HEAD, (2, 1, 1), {**SCHEME, "strategy": "attn_head"}),
        (COMPRESSED, CHANNEL, (2, 64), None),
        ("model.language_model.layers.{0}.self_attn.{1}_proj.{1}_scale", TENSOR, (), None),
        ("model.layers.{}.self_attn.attn.{}_scale", HEAD, (2,), None),
        ("model.layers.{}.self_attn.{}_proj.output_scale", TENSOR, (1,), None),
    ],
)
def test_scales_are_found_under_the_names_that_tools_write(
    form: str, spec: Any, shape: tuple[int, ...], scheme: dict[str, Any] | None, tmp_path: Path
) -> None:
    given = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5
    found = load_scales(checkpoint(tmp_path, named(form, 11, given.to(torch.bfloat16)), scheme), spec)
    assert len(found) == 11
    for layer, pair in enumerate(found):
        for which, scale in enumerate(pair):
            want = (given.to(torch.bfloat16) * (layer + 1) * (1 + which)).float()
            assert scale is not None
            assert torch.equal(scale.flatten(), want.flatten())


@pytest.mark.parametrize(
    ("tensors", "spec", "scheme", "reason"),
    [
        (
            named(COMPRESSED, 2, torch.ones(1)),
            HEAD,
            None,
            "layer 0: the checkpoint's scale of key is per tensor, .* write key.scale: tensor",
        ),
        (named(COMPRESSED, 2, torch.ones(3)), HEAD, None, r"of shape \[3\]"),
        (named(COMPRESSED, 2, torch.ones(1)), TENSOR, {**SCHEME, "strategy": "attn_head"}, "per head, and the format's is per tensor"),
        (named(COMPRESSED, 2, torch.ones(1)), TENSOR, {**SCHEME, "type": "int"}, "has int codes of 8 bits, and key of the format e4m3"),
        (named(COMPRESSED, 2, torch.ones(1)), TENSOR, {**SCHEME, "dynamic": True}, "dynamic: it has no scales"),
        (named(COMPRESSED, 2, torch.ones(1)), [TENSOR], None, "for 2 layers, and formats were given for 1"),
        (named(COMPRESSED, 2, torch.ones(1)), [TENSOR] * 3, None, "layer 2: the checkpoint has no scale of key"),
        ({"model.layers.0.self_attn.k_scale": HEADS}, HEAD, None, "layer 0: the checkpoint has no scale of value"),
        (named(COMPRESSED, 1, -torch.ones(1)), TENSOR, None, "layer 0: the scales of key must be finite and above 0"),
        ({**named(COMPRESSED, 1, HEADS), "layers.0.self_attn.k_zero_point": HEADS}, HEAD, None, "a static scale has no zero point"),
    ],
)
def test_what_does_not_fit_is_refused(tensors: dict[str, torch.Tensor], spec: Any, scheme: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        load_scales(checkpoint(tmp_path, tensors, scheme), spec)


def test_an_operand_whose_blocks_hold_scales_needs_none(tmp_path: Path) -> None:
    [(key, value)] = load_scales(checkpoint(tmp_path, {"model.layers.0.self_attn.k_scale": HEADS}), spec_of(k="8@head"))
    assert value is None
    assert key is not None
    assert torch.equal(key, HEADS)
