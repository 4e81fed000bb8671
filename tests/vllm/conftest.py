"""A small Llama of random weights in vLLM, on the CPU. Without vLLM nothing here is collected: `make test-vllm` installs it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from tests.vllm.engines import Engines, Watched

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="ERROR", VLLM_PLUGINS="kvgen",
)  # fmt: skip

VOCABULARY = 512


def write_model(folder: Path, **changes: Any) -> Path:
    """A folder with the configuration and the weights of a Llama, whose logits depend on attention."""
    from safetensors.torch import save_file

    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "torch_dtype": "float32",
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, **changes,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(0)

    def weight(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * scale / columns**0.5

    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, hidden, generator=random),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": weight(VOCABULARY, hidden, 1.5),
    }
    for number in range(config["num_hidden_layers"]):
        made = {
            "self_attn.q_proj": weight(q, hidden, 1.6), "self_attn.k_proj": weight(kv, hidden, 1.6),
            "self_attn.v_proj": weight(kv, hidden, 2.0), "self_attn.o_proj": weight(hidden, q, 2.0), "mlp.gate_proj": weight(inner, hidden),
            "mlp.up_proj": weight(inner, hidden), "mlp.down_proj": weight(hidden, inner), "input_layernorm": torch.ones(hidden),
            "post_attention_layernorm": torch.ones(hidden),
        }  # fmt: skip
        tensors |= {f"model.layers.{number}.{name}.weight": x for name, x in made.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def engine() -> Iterator[Engines]:
    from tests.vllm.engines import Engines

    engines = Engines()
    yield engines
    engines.close()


@pytest.fixture
def watched() -> Iterator[Watched]:
    from tests.vllm.engines import watching

    with watching() as seen:
        yield seen
        assert seen.steps > 0


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))
