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


PLANNED = (("k4v4", "default"), ("k2v2:h16/1:q4:page128", "default"), ("k8v8:token:q2", "u2s2c4"), ("k4v4:h10/2:page256", "u4s2c4"))


@pytest.mark.parametrize(("words", "schedule"), PLANNED)
def test_a_planned_step_agrees_with_the_static_one(words: str, schedule: str) -> None:
    """Sequences of unequal lengths, some empty: with a plan, and one by one, where there is a static schedule."""
    kernel = variant(KernelCase(words, schedule, backend="tilelang"))
    spec = kernel.spec.attention
    lengths = [2100, 0, 1, 128, 700, 1023]
    random = torch.Generator("cuda").manual_seed(1)

    def draw(batch: int, tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(batch, tokens, heads, spec.head_dim, generator=random, device="cuda").to(kernel.dtype)

    k, v = draw(len(lengths), 2100, spec.kv_heads), draw(len(lengths), 2100, spec.kv_heads)
    cache = kernel.new_cache(len(lengths), 2304, "cuda")
    kernel.prefill(cache, k, v, lengths)
    alone = []
    for b, length in enumerate(lengths):
        alone.append(kernel.new_cache(1, 2304, "cuda"))
        kernel.prefill(alone[b], k[b : b + 1], v[b : b + 1], [length])
    for _ in range(3):
        q = draw(len(lengths), spec.q_len, spec.q_heads)
        new = [draw(len(lengths), spec.q_len, spec.kv_heads) for _ in range(2)]
        plan = kernel.plan(cache, spec.q_len, append=True, uniform=False)
        got = kernel.decode(q, *new, cache, plan=plan)
        cache.advance(spec.q_len)
        for b, one in enumerate(alone):
            if not lengths[b]:
                assert not got[b].any()
                continue
            want = kernel.decode(q[b : b + 1], *(x[b : b + 1] for x in new), one)
            assert torch.linalg.vector_norm((got[b] - want[0]).float()) <= 2e-2 * torch.linalg.vector_norm(want.float())
        seen = kernel.attend(q, cache)
        assert torch.equal(kernel.attend(q, cache), seen)


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
