"""More query tokens than a kernel is compiled for: on the CPU, and the GPU's route with its flash attention stood in for."""

from __future__ import annotations

import pytest
import torch

from kvgen.format.layout import packed_layout
from kvgen.runtime import extend
from kvgen.runtime.calls import Variant
from kvgen.runtime.kvcache import KVCache
from kvgen.runtime.module import load
from kvgen.verify.reference import attend
from kvgen.verify.tolerance import relative_l2, tolerance
from tests.support.cpu import spec_of, variant
from tests.support.naive import BLOCK, naive_artifact, naive_spec
from tests.support.reference import ReferenceCache

BLOCK_32 = (("block", 32),)
SPECS = {
    "gqa": spec_of(heads="6/2", k="4c32", v="2t32"),
    "pages": spec_of(heads="4/1", k="4c32~64", v="4t32~16u", page=64),
    "pages-of-16": spec_of(heads="2/2", k="8t32", v="4t32", page=16),
    "window": spec_of(heads="4/2", dtype="float32", k="8t64s", v="2c32s", page=64, window=40, softcap=20.0),
    "arrival": spec_of(heads="4/2", k="4t64", v="8t32s", page=32, cache={"quantize": "arrival"}),
}
LENGTHS = (0, 1, 31, 340)


def normal(seed: int, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """[4, tokens, heads, dim]."""
    return torch.randn(len(LENGTHS), tokens, heads, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled(v: Variant, room: int = 720) -> tuple[KVCache, ReferenceCache]:
    """Poisoned memory, shuffled pages, LENGTHS tokens in two chunks."""
    a, page, table, pages = v.spec.attention, v.spec.cache.page, None, None
    if page is not None:
        need = -(-room // page)
        pages = need * len(LENGTHS) + 2
        table = torch.randperm(pages, generator=torch.Generator().manual_seed(5))[: need * len(LENGTHS)].reshape(-1, need).to(torch.int32)
    cache = v.new_cache(len(LENGTHS), room, "cpu", table, pages)
    for tensor, poison in ((cache.packed, 255), (cache.k_residual, torch.nan), (cache.v_residual, torch.nan)):
        tensor.fill_(poison)
    oracle = ReferenceCache(v.spec, len(LENGTHS), v.layout.tokens)
    first = [length // 3 for length in LENGTHS]
    for seed, counts in enumerate((first, [length - count for length, count in zip(LENGTHS, first, strict=True)])):
        k, x = (normal(10 * seed + which, max(counts), a.kv_heads, a.head_dim, v.dtype) for which in (0, 1))
        v.prefill(cache, k, x, counts)
        oracle.prefill(k, x, torch.tensor(counts))
    return cache, oracle


def near(v: Variant, got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    """(out, lse) of a call and of the reference."""
    assert relative_l2(got[0], want[0]) <= tolerance(v.dtype)
    assert relative_l2(got[1], want[1]) <= 5 * tolerance(v.dtype)


@pytest.mark.parametrize("q_len", [2, 17, 300])
@pytest.mark.parametrize("name", SPECS)
def test_a_prompt_over_a_cache_is_causal_and_ragged(name: str, q_len: int) -> None:
    """The spec's q_len is 1; sequences are empty, shorter and longer than the prompt. Then the same as a chunk that is appended."""
    v = variant(SPECS[name], () if SPECS[name].cache.page == 16 else BLOCK_32)
    a = v.spec.attention
    cache, oracle = filled(v)
    q = normal(3, q_len, a.q_heads, a.head_dim, v.dtype)
    near(v, v.attend(q, cache, out=torch.full_like(q, torch.nan), lse=True), oracle.attend(q))
    new = [normal(seed, q_len, a.kv_heads, a.head_dim, v.dtype) for seed in (4, 5)]
    near(v, v.decode(q, *new, cache, lse=True), oracle.decode(q, *new))
    assert cache.lengths.tolist() == [length + q_len for length in LENGTHS]
    near(v, v.attend(q[:, :1], cache, lse=True), oracle.attend(q[:, :1]))


# --- the route of a GPU ------------------------------------------------------------------------------------------------


def stand_in(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, used: torch.Tensor, scale: float, first: int = 0, window: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What torch's flash attention computes, in fp64; for a query that sees nothing an LSE of inf."""
    out, lse = attend(q, k[:, first:], v[:, first:], used - first, scale=scale, window=window)
    return out.to(q.dtype), lse.float().masked_fill(lse == -torch.inf, torch.inf)


def dense_stand_in(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """What cuDNN computes, in fp64: every query sees all of k, or in a square as much as precedes it."""
    if causal:
        assert k.shape[1] == q.shape[1]
        out, lse = attend(q, k, v, torch.full((q.shape[0],), q.shape[1]), scale=scale)
        return out.to(q.dtype), lse.float()
    rows = [attend(q[:, i : i + 1], k, v, scale=scale) for i in range(q.shape[1])]
    return torch.cat([out for out, _ in rows], 1).to(q.dtype), torch.cat([lse for _, lse in rows], 2).float()


def naive_variant(paged: bool) -> Variant:
    spec = naive_spec(paged)
    return Variant(spec, packed_layout(spec, BLOCK, "simd"), load(naive_artifact().path))


@pytest.mark.parametrize("limit", [1 << 30, 1_500_000, 300_000, 1])
@pytest.mark.parametrize("name", ["gqa", "pages", "arrival", "contiguous fp32"])
def test_the_route_over_dequantized_parts(name: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sequences at once, some, one with some of its heads, one head."""
    if limit < 500_000 and name != "contiguous fp32":
        limit = 500_000  # modules for the CPU unpack all heads at once
    monkeypatch.setattr(extend, "DEQUANTIZED_BYTES", limit)
    monkeypatch.setattr(extend, "flash", stand_in)
    monkeypatch.setattr(extend, "on_cpu", extend.on_gpu)
    v = naive_variant(False) if name == "contiguous fp32" else variant(SPECS[name], BLOCK_32)
    a, q_len = v.spec.attention, 50
    cache, oracle = filled(v)
    q = normal(3, q_len, a.q_heads, a.head_dim, v.dtype)
    near(v, v.attend(q, cache, lse=True), oracle.attend(q))
    for step in range(2):
        new = [normal(seed + step, q_len, a.kv_heads, a.head_dim, v.dtype) for seed in (4, 5)]
        near(v, v.decode(q, *new, cache, lse=True), oracle.decode(q, *new))
    assert cache.lengths.tolist() == oracle.lengths.tolist()
    near(v, v.attend(q, cache, lse=True, scale=0.3), oracle.attend(q, scale=0.3))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The route of a GPU over fp64 stand-ins, prefixes in steps of 16; (kernel, tokens of K or begin of them) of the calls, in order."""
    calls: list[tuple[str, int]] = []

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool = False) -> extend.Partial:
        calls.append(("square" if causal else "prefix", k.shape[1]))
        return dense_stand_in(q, k, v, scale, causal=causal)

    def flash(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, used: torch.Tensor, scale: float, first: int = 0, window: int | None = None
    ) -> extend.Partial:
        calls.append(("flash", first))
        return stand_in(q, k, v, used, scale, first, window)

    monkeypatch.setattr(extend, "PREFIX_STEP", 16)
    monkeypatch.setattr(extend, "PLANNED", 1)
    monkeypatch.setattr(extend, "flash", flash)
    monkeypatch.setattr(extend, "dense", dense)
    monkeypatch.setattr(extend, "dense_fits", lambda q: True)
    monkeypatch.setattr(extend, "on_cpu", extend.on_gpu)
    return calls


def attend_then_decode(name: str, lengths: tuple[int, ...], q_len: int) -> None:
    """A prompt over sequences of these lengths, then one that is appended, both against the oracle."""
    v = variant(SPECS[name], BLOCK_32)
    a = v.spec.attention
    cache = v.new_cache(len(lengths), 448)
    oracle = ReferenceCache(v.spec, len(lengths), v.layout.tokens)
    k, x = (normal(seed, max(1, *lengths), a.kv_heads, a.head_dim, v.dtype) for seed in (1, 2))
    v.prefill(cache, k, x, lengths)
    oracle.prefill(k, x, torch.tensor(lengths))
    q = normal(3, q_len, a.q_heads, a.head_dim, v.dtype)
    near(v, v.attend(q, cache, out=torch.full_like(q, torch.nan), lse=True), oracle.attend(q))
    new = [normal(seed, q_len, a.kv_heads, a.head_dim, v.dtype) for seed in (4, 5)]
    near(v, v.decode(q, *new, cache, lse=True), oracle.decode(q, *new))
    assert cache.lengths.tolist() == [length + q_len for length in lengths]


@pytest.mark.parametrize("name", ["gqa", "pages"])
@pytest.mark.parametrize("lengths", [(120, 97, 340, 98), (97, 300, 81, 200), (20, 300, 300, 300)])
def test_what_all_queries_see_is_attended_apart(name: str, lengths: tuple[int, ...], kernels: list[tuple[str, int]]) -> None:
    """Steps of 16 tokens: of the shortest sequence before the prompt. Flash attention has the rest."""
    attend_then_decode(name, lengths, 33)
    want: list[tuple[str, int]] = []
    for seen in max(0, min(lengths) - 33), min(lengths):
        prefix = seen // 16 * 16
        want += [("prefix", prefix), ("flash", prefix)] if prefix else [("flash", 0)]
    assert kernels == want


@pytest.mark.parametrize("name", ["gqa", "pages"])
@pytest.mark.parametrize(("length", "q_len"), [(101, 33), (301, 50), (64, 64)])
def test_equal_lengths_need_no_flash_attention(name: str, length: int, q_len: int, kernels: list[tuple[str, int]]) -> None:
    """The whole prefix, however long, and the square of the prompt; a prompt over nothing but itself is one call."""
    attend_then_decode(name, (length,) * 4, q_len)
    before = [("prefix", length - q_len)] if length > q_len else []
    assert kernels == [*before, ("square", q_len), ("prefix", length), ("square", q_len)]


ROUTES = {
    "window": ({"window": 40, "page": 64}, ["flash"]),
    "softcap": ({"softcap": 2.0}, []),
    "wide heads": ({"dim": 272, "v": "4t272"}, []),
    "window and softcap": ({"window": 33, "softcap": 2.0, "page": 64}, []),
}


@pytest.mark.parametrize("name", ROUTES)
def test_windows_and_soft_caps_on_the_route_of_a_gpu(name: str, kernels: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash attention has windows, plain products have soft caps, few queries at a time. cuDNN has neither. Queries may see nothing."""
    attention, route = ROUTES[name]
    monkeypatch.setattr(extend, "SCORE_BYTES", 4 * 4 * 340 * 7)
    v = variant(spec_of(k="4c32", **{"v": "4t32", **attention}), BLOCK_32)
    a, q_len = v.spec.attention, 50
    cache, oracle = filled(v)
    for step in range(2):
        q, *new = (normal(seed + step, q_len, heads, a.head_dim, v.dtype) for seed, heads in ((3, 4), (4, 2), (5, 2)))
        near(v, v.decode(q, *new, cache, out=torch.full_like(q, torch.nan), lse=True), oracle.decode(q, *new))
    if "page" in attention:  # more queries than the empty sequence has tokens now
        q = normal(9, 130, a.q_heads, a.head_dim, v.dtype)
        near(v, v.attend(q, cache, lse=True, scale=0.3), oracle.attend(q, scale=0.3))
    assert {kernel for kernel, _ in kernels} == set(route)


@pytest.mark.parametrize("lengths", [(0, 1, 31, 340), (101,) * 4])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_sinks_join_the_softmax_once(lengths: tuple[int, ...], softcap: float, kernels: list[tuple[str, int]]) -> None:
    """Over one part or two, with the LSE or without; a query that sees nothing has an output of 0, and its sink for LSE."""
    v = variant(spec_of(k="4c32", v="4t32", softcap=softcap), BLOCK_32)
    a, q_len = v.spec.attention, 50
    cache = v.new_cache(4, 512)
    k, x = (normal(seed, max(lengths), a.kv_heads, a.head_dim, v.dtype) for seed in (1, 2))
    v.prefill(cache, k, x, lengths)
    held = v.unpack(cache)
    sinks = torch.tensor([-1.0, 0.5, 3.0, 7.0])
    q = normal(3, q_len, a.q_heads, a.head_dim, v.dtype)
    want = attend(q, *held, cache.lengths, softcap=softcap, sinks=sinks)
    out, lse = torch.full_like(q, torch.nan), torch.full((4, a.q_heads, q_len), torch.nan)
    for given in (lse, None):
        call = extend.Call(q, None, out, given, sinks, v.scale, max(lengths), 512, cache.sequences.overflow.address, a.softcap, a.window)
        extend.on_gpu(v._distinct[0].module, cache.tensors, call)
        near(v, (out, lse), want)
    if lengths[0] == 0:
        assert not out[0].any()
        assert torch.equal(lse[0], sinks.unsqueeze(1).expand(-1, q_len))
    assert bool(kernels) == (softcap == 0)
