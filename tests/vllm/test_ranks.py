"""Tensor parallelism: a process for each rank, which finds the backend by its entry point."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.vllm.engines import Engines, generate, ids, same
from tests.vllm.test_weights import stored

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_two_ranks_are_one(engine: Engines, model: Path, tmp_path: Path) -> None:
    """Each has a KV head, with its own static scale; the prefix cache serves both."""
    scales = {f"model.layers.{layer}.self_attn.{x}_scale": torch.tensor([0.02, 0.05]) for layer in range(2) for x in "kv"}
    save_file(scales, tmp_path / "scales.safetensors")
    form = {x: {"type": "e4m3", "axis": "token", "scale": "head"} for x in ("key", "value")}
    form |= {"scales": str(tmp_path / "scales.safetensors")}
    prompts = [ids(0, 40), ids(1, 200)]
    one, _ = generate(engine(model, form), prompts, 8)
    llm = engine(model, form, tensor_parallel_size=2)
    same(generate(llm, prompts, 8)[0], one, limit=1e-2)
    again, hits = generate(llm, prompts, 8)
    assert hits == [0, 128]
    same(again, one, limit=1e-2)


def test_two_ranks_have_their_parts_of_packed_weights(engine: Engines, model: Path, tmp_path: Path) -> None:
    """Of codes, scales and zeros, along both axes, as vLLM divides the checkpoint's tensors."""
    folder = stored(model, tmp_path, "gptq")
    prompts = [ids(0, 40), ids(1, 200)]
    one, _ = generate(engine(folder, None, quantization="kvgen"), prompts, 8)
    two, _ = generate(engine(folder, None, quantization="kvgen", tensor_parallel_size=2), prompts, 8)
    same(two, one, limit=1e-3)
