"""TileLang's kernels on the GPU: formats, shapes, schedules and older targets against the fp64 reference."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from tests.support.kernel_cases import KernelCase, variant, verify

pytestmark = pytest.mark.skipif(find_spec("tilelang") is None, reason="TileLang is not installed")

FORMATS = (
    "k4v4", "k8v8", "k2v2", "k8v4", "k4v2", "k2v8", "k4v4:kg32", "k2v2:kg64", "k4v4:kg512", "k4v4:sym", "k8v8:sym", "k2v2:sym",
    "k4v4:token", "k2v2:token", "k8v8:token:sym", "k4v4:bf16", "k8v8:bf16:sym", "k2v2:bf16:token",
    "k4v4:h32/32", "k8v8:h8/1", "k4v4:h12/2", "k4v4:h16/1", "k2v2:h32/2", "k8v4:token:h128/1:d64",
    "k4v4:d64", "k8v8:d96", "k8v4:token:d32",
    "k4v4:q4", "k2v2:q4:h8/1", "k4v4:q8:h8/4", "k4v4:q3:token", "k8v8:q8:h4/4:bf16",
    "k4v4:page256", "k8v8:page64:kg64", "k2v2:page64:token", "k4v4:q4:page64:kg32",
)  # fmt: skip
SCHEDULES = {"k4v4": ("u2s2c8", "u2s3c4", "u4s2c4", "n256.u4s3c2"), "k8v8": ("u2s2c4", "u1s3c8"), "k2v2:token": ("n32.u1s3c8", "u4s2c8")}


def cases(words: tuple[str, ...], schedules: tuple[str, ...] = ("default",), target: str = "sm90") -> list[KernelCase]:
    return [KernelCase(word, schedule, target, "tilelang") for word in words for schedule in schedules]  # type: ignore[arg-type]


@pytest.mark.parametrize("case", cases(FORMATS), ids=str)
def test_formats_and_shapes_agree_with_the_reference(case: KernelCase) -> None:
    verify(case)


@pytest.mark.parametrize("case", [case for words, schedules in SCHEDULES.items() for case in cases((words,), schedules)], ids=str)
def test_schedules_agree_with_the_reference(case: KernelCase) -> None:
    verify(case)


OLDER = ("k4v4", "k8v8", "k2v2", "k4v4:bf16:q4:page128", "k8v8:d64:h5/1")


@pytest.mark.parametrize("case", [*cases(OLDER, target="sm80"), *cases(OLDER, target="sm89")], ids=str)
def test_older_targets_agree_through_their_ptx(case: KernelCase) -> None:
    verify(case)


@pytest.mark.parametrize("words", ["k4v4", "k4v4:bf16:page128"])
def test_both_back_ends_read_one_cache(words: str) -> None:
    """What one packs or appends the other reads; their outputs agree to the tolerance of both."""
    mine, other = variant(KernelCase(words, backend="tilelang")), variant(KernelCase(words))
    assert mine.layout.id == other.layout.id
    spec = mine.spec.attention
    random = torch.Generator("cuda").manual_seed(1)

    def draw(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(2, tokens, heads, spec.head_dim, generator=random, device="cuda").to(mine.dtype)

    cache = other.new_cache(2, 1024, "cuda")
    other.prefill(cache, draw(500, spec.kv_heads), draw(500, spec.kv_heads), [500, 383])
    for step in range(20):
        q, k, v = draw(1, spec.q_heads), draw(1, spec.kv_heads), draw(1, spec.kv_heads)
        (mine if step % 2 else other).decode(q, k, v, cache)
        a, b = mine.attend(q, cache).float(), other.attend(q, cache).float()
        assert torch.linalg.vector_norm(a - b) <= 1e-2 * torch.linalg.vector_norm(b)
