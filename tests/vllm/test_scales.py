"""Static scales out of the checkpoint that vLLM serves."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.vllm.conftest import write_model
from tests.vllm.engines import Engines, Watched, generate, ids

SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


def test_scales_of_a_checkpoint(engine: Engines, tmp_path: Path, watched: Watched) -> None:
    """As compressed-tensors writes them: each layer reads its own, and every row is that of the reference with them."""
    scheme = {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": [], "kv_cache_scheme": SCHEME}
    model = write_model(tmp_path / "model", quantization_config=scheme, torch_dtype="bfloat16")
    given = {(layer, name): torch.rand(1) * 0.02 + 0.01 for layer in range(2) for name in "kv"}
    save_file(
        {f"model.layers.{layer}.self_attn.{name}_proj.{name}_scale": x for (layer, name), x in given.items()}, model / "s.safetensors"
    )
    watched.limit = 2e-2  # bfloat16
    form = {name: {"type": "e4m3", "axis": "token", "scale": "tensor"} for name in ("key", "value")}
    llm = engine(model, form, dtype="bfloat16", kv_cache_dtype="bfloat16", block_size=16)
    generate(llm, [ids(0, 40), ids(1, 20)], 4)
    assert watched.rows["cached"] == 2 * 2 * 4
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    for name, layer in layers.items():
        number = int(name.split(".")[2])
        assert torch.equal(layer.impl.scales[:, 1, 5], torch.cat([given[number, "k"], given[number, "v"]])), name
