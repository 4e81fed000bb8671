"""Contiguous caches with a sliding window: they keep the blocks that steps see, in places that are used in turn."""

from __future__ import annotations

import pytest
import torch

from kvgen.format.residual import first_held, window_places
from kvgen.runtime import extend
from kvgen.runtime.calls import Variant
from kvgen.spec import KernelSpec
from kvgen.verify.calls import poison
from kvgen.verify.tolerance import relative_l2, tolerance
from tests.support.cpu import spec_of, variant
from tests.support.reference import ReferenceCache
from tests.unit.runtime.test_extend import normal, stand_in

BLOCK_32 = (("block", 32),)
SPEC = spec_of(window=70, q_len=3)
PLACES = 5
"""72 tokens in 3 blocks of 32, one block that they begin in, and one that is packed meanwhile."""


def near(v: Variant, got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    for mine, truth in zip(got, want, strict=True):
        assert relative_l2(mine, truth) <= 5 * tolerance(v.dtype)


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "route of a gpu"])
def test_a_long_life_in_few_blocks_agrees_with_fp64(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts shorter and longer than the memory, steps that fill blocks, chunks; `unpack` gives what is held and nothing else."""
    if gpu:
        monkeypatch.setattr(extend, "flash", stand_in)
        monkeypatch.setattr(extend, "on_cpu", extend.on_gpu)
    v = variant(SPEC, BLOCK_32)
    a = v.spec.attention
    cache = poison(v.new_cache(4, 2000))
    assert cache.packed.shape[2] == PLACES
    oracle = ReferenceCache(v.spec, 4, 32)
    for seed, counts in enumerate([(0, 31, 400, 90), (5, 700, 0, 130)]):
        k, x = (normal(10 * seed + which, max(counts), a.kv_heads, a.head_dim, v.dtype) for which in (0, 1))
        v.prefill(cache, k, x, counts)
        oracle.prefill(k, x, torch.tensor(counts))
    for seed, q_len in enumerate([1, 3] * 12 + [250, 2, 40, 3]):
        q, *new = (normal(100 + 3 * seed + i, q_len, heads, a.head_dim, v.dtype) for i, heads in enumerate((4, 2, 2)))
        near(v, v.decode(q, *new, cache, out=torch.full_like(q, torch.nan), lse=True), oracle.decode(q, *new))
    near(v, v.attend(q, cache, lse=True), oracle.attend(q))
    lengths = cache.lengths.tolist()
    assert lengths == oracle.lengths.tolist()
    k, x = (torch.full((4, max(lengths), a.kv_heads, a.head_dim), -77.0, dtype=v.dtype) for _ in range(2))
    v.unpack(cache, k, x)
    for b, length in enumerate(lengths):
        first = first_held(v.spec, 32, length) * 32
        assert 0 < first <= length - 72
        for mine, want in zip((k, x), oracle.keys_values(), strict=True):
            assert bool((mine[b, :first] == -77).all())
            assert bool((mine[b, length:] == -77).all())
            assert relative_l2(mine[b, first:length], want[b, first:length]) <= 1e-3


def test_more_queries_than_the_cache_keeps_tokens_for_are_refused() -> None:
    v = variant(SPEC, BLOCK_32)
    a = v.spec.attention
    cache = v.new_cache(4, 1000)
    k = normal(1, 300, a.kv_heads, a.head_dim, v.dtype)
    v.prefill(cache, k[:, :150], k[:, :150])
    v.attend(normal(2, 150, a.q_heads, a.head_dim, v.dtype), cache)  # nothing was overwritten yet
    v.prefill(cache, k[:, 150:], k[:, 150:])
    v.attend(normal(2, PLACES * 32 - 69, a.q_heads, a.head_dim, v.dtype), cache)
    with pytest.raises(ValueError, match=r"attend with 92 query tokens sees 161 tokens, and .* keeps the newest 160: .* decode"):
        v.attend(normal(2, PLACES * 32 - 68, a.q_heads, a.head_dim, v.dtype), cache)
    with pytest.raises(ValueError, match=r"tokens from 127 on are needed, and the cache holds 5 blocks"):
        v.module.attend(*_bare(v, cache, 104))


def _bare(v: Variant, cache, q_len: int) -> tuple[object, ...]:
    q = normal(2, q_len, 4, 64, v.dtype)
    return q, *cache.tensors, torch.empty_like(q), None, None, torch.zeros(1 << 20, dtype=torch.uint8), None, 0.1, 300


@pytest.mark.parametrize(("window", "q_len", "rollback"), [(1, 1, 0), (70, 3, 0), (128, 1, 0), (100, 8, 9), (4096, 1, 40)])
def test_whatever_a_step_sees_is_held(window: int, q_len: int, rollback: int) -> None:
    """At every length, after as many tokens were taken back as may be, and while one more block is being packed."""
    spec = KernelSpec(
        attention={"q_heads": 1, "kv_heads": 1, "head_dim": 64, "window": window, "q_len": q_len},  # type: ignore[arg-type]
        key={"bits": 4, "group": 16},  # type: ignore[arg-type]
        value={"bits": 4, "group": 64},  # type: ignore[arg-type]
        cache={"rollback": rollback},  # type: ignore[arg-type]
    )
    for length in range(3 * window + 200):
        first_seen = max(0, length - q_len - window + 1)
        newest = (length + rollback) // 16  # blocks that were packed before tokens were taken back
        assert first_held(spec, 16, length) * 16 <= first_seen
        assert first_seen // 16 > newest - window_places(spec, 16)
