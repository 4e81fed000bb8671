from __future__ import annotations

import math

import pytest
import torch

from kvgen.errors import CacheMismatch
from kvgen.format.layout import packed_layout
from kvgen.runtime.calls import Variant
from kvgen.runtime.kvcache import KVCache
from kvgen.runtime.module import Module, load
from tests.support.cpu import spec_of
from tests.support.cpu import variant as compiled
from tests.support.naive import BLOCK, naive_artifact, naive_layout, naive_spec


@pytest.fixture(scope="module")
def module() -> Module:
    return load(naive_artifact().path)


@pytest.fixture
def variant(module: Module) -> Variant:
    spec = naive_spec()
    return Variant(spec, naive_layout(spec), module)


def tokens(count: int, batch: int = 2, heads: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, count, heads, 32, generator=torch.Generator().manual_seed(seed))


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    args = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*args, enable_gqa=True).transpose(1, 2)


def filled(variant: Variant, count: int, max_len: int = 128) -> KVCache:
    cache = variant.new_cache(2, max_len)
    variant.prefill(cache, tokens(count), tokens(count, seed=1))
    return cache


def test_prefill_then_decode_equals_attention_over_all_tokens(variant: Variant) -> None:
    k, v, q = tokens(71), tokens(71, seed=1), tokens(1, heads=4, seed=2)
    cache = variant.new_cache(2, 96)
    variant.prefill(cache, k[:, :70], v[:, :70])
    out = variant.decode(q, k[:, 70:], v[:, 70:], cache)
    torch.testing.assert_close(out, sdpa(q, k, v))
    assert cache.bound == 71
    assert cache.lengths.tolist() == [71, 71]
    torch.testing.assert_close(variant.attend(q, cache), out)
    torch.testing.assert_close(variant.unpack(cache), (k, v))


def test_a_cache_refuses_what_it_could_not_hold(variant: Variant) -> None:
    cache, q, new = filled(variant, 128), tokens(1, heads=4), tokens(1)
    with pytest.raises(CacheMismatch, match=r"^the cache holds max_len=128 tokens per sequence, and 129 could be needed after 1 more: "):
        variant.decode(q, new, new, cache)
    with pytest.raises(CacheMismatch, match="168 could be needed"):
        variant.prefill(cache, tokens(40), tokens(40))
    assert cache.lengths.tolist() == [128, 128]
    cache.clear()
    assert variant.decode(q, new, new, cache).shape == q.shape
    assert cache.lengths.tolist() == [1, 1]


def test_caches_of_another_layout_are_refused(variant: Variant, module: Module) -> None:
    other = Variant(variant.spec, packed_layout(variant.spec, 2 * BLOCK, "simd"), module)
    cache, q, new = filled(variant, 40), tokens(1, heads=4), tokens(1)
    for call in (
        lambda: other.attend(q, cache),
        lambda: other.decode(q, new, new, cache),
        lambda: other.prefill(cache, new, new),
        lambda: other.unpack(cache),
    ):
        with pytest.raises(CacheMismatch, match=f"{variant.layout.id}, and this kernel reads layout {other.layout.id}: .* new_cache"):
            call()
    assert cache.bound == 40


def test_block_tables_are_checked(module: Module, variant: Variant) -> None:
    spec = naive_spec(paged=True)
    paged = Variant(spec, naive_layout(spec), module)
    with pytest.raises(ValueError, match=r"block_table must be int32 \[2, 3 or more\], not torch.int32 \[2, 2\]"):
        paged.new_cache(2, 192, block_table=torch.zeros(2, 2, dtype=torch.int32), pages=4)
    wide = torch.zeros(2, 16, dtype=torch.int32)
    assert paged.new_cache(2, 192, block_table=wide[:, :3], pages=4).block_table.data_ptr() == wide.data_ptr()
    with pytest.raises(ValueError, match=r"must be next to each other in block_table, whose strides are \[16, 2\]"):
        paged.new_cache(2, 192, block_table=wide[:, ::2], pages=4)
    with pytest.raises(ValueError, match="needs `pages`"):
        paged.new_cache(2, 192, block_table=torch.zeros(2, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="need 6 pages, not 5"):
        paged.new_cache(2, 192, pages=5)
    with pytest.raises(ValueError, match="this format is contiguous"):
        variant.new_cache(2, 192, pages=5)
    with pytest.raises(ValueError, match="must be at least 1"):
        variant.new_cache(0, 192)


@pytest.mark.parametrize(
    ("lengths", "kind", "reason"),
    [
        ([2**40, 1], ValueError, r"lengths must lie in 0\.\.8, the tokens of k, not in 1\.\.1099511627776"),
        (torch.tensor([1.0, 2.0]), TypeError, "lengths must be whole numbers, not float32"),
        (torch.tensor([True, False]), TypeError, "lengths must be whole numbers, not bool"),
        ([1.5, 2], TypeError, "lengths must be whole numbers, not float32"),
        ("12", TypeError, "must be a tensor or a sequence of whole numbers, not str"),
        (3, ValueError, r"lengths must have shape \[2\], not \[\]"),
        (torch.tensor([[1, 2]]), ValueError, r"lengths must have shape \[2\], not \[1, 2\]"),
        (torch.zeros(2, dtype=torch.int32, device="meta"), ValueError, "lengths has no memory"),
    ],
)
def test_lengths_that_are_none_are_refused(variant: Variant, lengths: object, kind: type[Exception], reason: str) -> None:
    cache = filled(variant, 40)
    with pytest.raises(kind, match=reason):
        variant.prefill(cache, tokens(8), tokens(8), lengths)  # type: ignore[arg-type]
    assert cache.bound == 40
    assert cache.lengths.tolist() == [40, 40]


@pytest.mark.parametrize(
    ("scale", "kind", "reason"),
    [
        (math.nan, ValueError, r"scale \(nan\) must be finite, and a number that float32 holds"),
        (-3e38, ValueError, r"scale \(-3e\+38\) must be finite"),
        (10**400, ValueError, "must be finite"),
        (torch.tensor(0.5), TypeError, "scale must be a float"),
        (True, TypeError, "scale must be a float"),
    ],
)
def test_scales_that_float32_does_not_hold_are_refused(variant: Variant, scale: float, kind: type[Exception], reason: str) -> None:
    cache, q = filled(variant, 40), tokens(1, heads=4)
    with pytest.raises(kind, match=reason):
        variant.attend(q, cache, scale=scale)


@pytest.mark.parametrize(
    ("call", "kind", "reason"),
    [
        (lambda v, c, q: v.attend(q.flatten(), c), ValueError, "q must have shape"),
        (lambda v, c, q: v.attend(q.numpy(), c), TypeError, "q must be a torch tensor, not numpy.ndarray"),
        (lambda v, c, q: v.attend(c, q), TypeError, "cache must be a KVCache, which new_cache makes, not Tensor"),
        (lambda v, c, q: v.decode(q, [1.0], None, c), TypeError, "k_new must be a torch tensor, not builtins.list"),
        (lambda v, c, q: v.prefill(c, q.numpy(), q.numpy()), TypeError, "k must be a torch tensor"),
        (lambda v, c, q: v.attend(q, c, out=torch.empty_like(q).requires_grad_()), ValueError, r"give out\.detach\(\) instead"),
        (lambda v, c, q: v.attend(q, c, lse=torch.empty(2, 4, 2)[..., :1]), ValueError, "lse must be contiguous"),
        (lambda v, c, q: v.attend(q, c, lse=torch.empty(2, 4)), ValueError, r"lse must have shape \[2, 4, 1\]"),
        (lambda v, c, q: v.new_cache(like=v), TypeError, "like must be a KVCache, not Variant"),
        (lambda v, c, q: v.new_cache(2, 64, device="gpu"), ValueError, "device must be a torch device, not 'gpu'"),
        (lambda v, c, q: v.new_cache(2, 64, device="meta"), ValueError, "kernels run on the CPU and on CUDA devices, not on meta"),
    ],
)
def test_what_is_no_tensor_or_no_cache_is_refused_by_kind(variant: Variant, call, kind: type[Exception], reason: str) -> None:
    cache = filled(variant, 40)
    with pytest.raises(kind, match=reason):
        call(variant, cache, tokens(1, heads=4))
    assert cache.bound == 40


def test_learned_sinks_are_given_exactly_where_the_spec_has_them(variant: Variant) -> None:

    with_sinks = compiled(spec_of(sinks=True))
    for v, given, error, match in (
        (variant, torch.zeros(4), ValueError, "this format has no learned sinks"),
        (with_sinks, None, ValueError, r"this format has learned sinks \(attention.sinks\): give sinks=, float32 \[q_heads\]"),
        (with_sinks, torch.zeros(3), ValueError, r"sinks must have shape \[4\], not \[3\]"),
        (with_sinks, torch.zeros(4).half(), ValueError, "sinks must be torch.float32"),
        (with_sinks, torch.zeros(8)[::2], ValueError, "sinks must be contiguous"),
        (with_sinks, [0.0] * 4, TypeError, "sinks must be a torch tensor"),
    ):
        a = v.spec.attention
        q = torch.zeros(1, 1, a.q_heads, a.head_dim, dtype=v.dtype)
        with pytest.raises(error, match=match):
            v.attend(q, v.new_cache(1, 64), sinks=given)  # type: ignore[arg-type]
