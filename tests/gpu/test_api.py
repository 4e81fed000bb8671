"""From a spec to tensors on a GPU: the default, a registered entry, a compiled step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvgen
from kvgen.api import forget
from kvgen.integrations import torch_ops
from kvgen.registry.store import Store
from kvgen.spec import KernelSpec, load_spec
from kvgen.spec.target import resolve
from kvgen.verify.tolerance import relative_l2, tolerance
from tests.gpu.oracle import attend, contents, normal

BATCH, TOKENS, CAPACITY = 2, 300, 1024


@pytest.fixture
def spec() -> KernelSpec:
    return load_spec(
        {
            "name": "on-a-gpu",
            "attention": {"q_heads": 32, "kv_heads": 8, "head_dim": 128},
            "key": {"bits": 4, "axis": "channel", "group": 128},
            "value": {"bits": 4, "axis": "token", "group": 64},  # no shipped entry has it
            "workloads": [{"batch": BATCH, "kv_len": CAPACITY}],
        }
    )


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name in ("REGISTRY", "SITE"):
        monkeypatch.setenv(f"KVGEN_{name}_DIR", str(tmp_path / name))
    forget()
    yield Store(tmp_path / "REGISTRY")
    forget()


def _random(seed: int, tokens: int, heads: int) -> torch.Tensor:
    return normal(seed, BATCH, tokens, heads, 128, dtype=torch.float16)


def _step(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _random(seed, 1, 32), _random(seed + 1, 1, 8), _random(seed + 2, 1, 8)


def _filled(kernel: kvgen.Kernel) -> torch_ops.KVCache:
    cache = kernel.new_cache(BATCH, CAPACITY)
    kernel.prefill(cache, _random(1, TOKENS, 8), _random(2, TOKENS, 8))
    return cache


def test_the_default_is_right(registry, spec):
    with pytest.warns(kvgen.FallbackWarning, match="default schedule"):
        kernel = kvgen.get_kernel(spec)
    assert kernel.target == resolve("native")
    cache = _filled(kernel)
    q = _random(3, 1, 32)
    out = kernel.attend(q, cache)
    for b in range(BATCH):
        want, _ = attend(spec, q[b], *contents(kernel.layout, cache, b, TOKENS))
        assert relative_l2(out[b], want) <= tolerance(torch.float16)


@pytest.mark.filterwarnings("ignore::kvgen.FallbackWarning")
def test_a_compiled_step_and_a_captured_one_are_the_kernels_own(registry, spec):
    """To rounding: `decode` knows that the lengths are equal, and operators plan, with other splits."""
    kernel = kvgen.get_kernel(spec)
    plain, compiled, captured = _filled(kernel), _filled(kernel), _filled(kernel)
    bound = torch_ops.Attention(kernel, compiled)
    torch.library.opcheck(torch_ops.attend, (_step(0)[0], *bound._rest()))
    step = torch.compile(bound, fullgraph=True, backend="aot_eager")
    static = _step(0)
    module, graph = torch_ops.Attention(kernel, captured), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(*static)
    for seed in range(5):
        inputs = _step(10 * seed)
        expected = kernel.decode(*inputs, plain)
        assert relative_l2(step(*inputs), expected) <= tolerance(torch.float16)
        for place, value in zip(static, inputs, strict=True):
            place.copy_(value)
        graph.replay()
        assert relative_l2(out, expected) <= tolerance(torch.float16)
    assert compiled.lengths.tolist() == captured.lengths.tolist() == [TOKENS + 5] * BATCH
