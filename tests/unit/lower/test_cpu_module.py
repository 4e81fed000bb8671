"""CPU modules against the fp64 reference: formats, schedules, appends across blocks, errors of callers."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvgen.runtime.kvcache import KVCache
from kvgen.runtime.variant import Variant
from kvgen.spec import KernelSpec
from kvgen.verify import CheckPolicy
from kvgen.verify.attention import attend
from kvgen.verify.cache import ReferenceCache
from kvgen.verify.calls import poison
from kvgen.verify.check import check
from kvgen.verify.data import learned_sinks
from kvgen.verify.packing import pack_blocks, to_blocks, unpack_blocks
from kvgen.verify.quantize import torch_dtype
from kvgen.verify.tolerance import relative_l2, tolerance
from tests.support.cpu import spec_of, variant
from tests.support.packed import meaningful_bytes

POLICY = CheckPolicy(long_tokens=300, most_tokens=1 << 13)

FORMATS = {
    "int4": spec_of(),
    "int8-symmetric": spec_of(k="8c32s", v="8t64s"),
    "int2": spec_of(dim=128, k="2c64", v="2t64", heads="8/2"),
    "per-token": spec_of(k="4t16", v="4t16"),
    "per-channel": spec_of(k="4c16", v="2c16"),
    "groups-that-fit-no-vector": spec_of(dim=48, k="2t8", v="4t12"),
    "groups-of-48": spec_of(dim=80, heads="5/1", k="8c48", v="4c48s"),
    "float32": spec_of(dtype="float32", k="8t64s", v="2c32s"),
    "bfloat16": spec_of(dtype="bfloat16", k="4c32", v="8t32"),
    "plain": spec_of(k="16", v="16"),
    "plain-k-bfloat16": spec_of(dtype="bfloat16", k="16", v="2t32"),
    "plain-float32": spec_of(dtype="float32", k="4c32", v="16"),
    "boosted": spec_of(dim=128, k="2c128+8mean_abs", v="2t128", heads="8/2"),
    "boosted-half-by-range-paged": spec_of(dim=80, k="2c32+2range", v="4t80", page=64, q_len=3),
    "boosted-six-channels-bfloat16": spec_of(dim=48, dtype="bfloat16", k="2c16+8static", v="2t16"),
    "boosted-expanded-float32": spec_of(dtype="float32", k="2c48+4mean_abs", v="4t4"),
    "paged": spec_of(page=64, q_len=4),
    "pages-of-16": spec_of(page=16, k="4t32", v="2c16"),
    "softcap-window": spec_of(dtype="float32", softcap=30.0, window=100),
    "one-kv-head": spec_of(heads="71/1", dim=32),
    "sink-and-local": spec_of(k="2c32", v="2t64", page=64, cache={"sink": 5, "local": 40}),
    "long-sink": spec_of(k="4t32", v="2c16", sinks=True, cache={"sink": 100, "rollback": 3}),
    "rollback": spec_of(dtype="float32", page=32, q_len=4, cache={"local": 16, "rollback": 40}),
    "rollback-window": spec_of(k="8c32s", window=70, softcap=20.0, sinks=True, page=32, cache={"local": 33, "rollback": 5}),
    "rollback-plain": spec_of(k="16", v="16", cache={"rollback": 8}),
    "wide-head": spec_of(heads="2/2", dim=256, k="8t256", v="8t128"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_right_and_packs_the_codes_of_the_reference(name: str) -> None:
    accuracy = check(variant(FORMATS[name]), "cpu", POLICY)
    assert accuracy.get("code_mismatches", 0) == 0
    assert accuracy["relative_l2"] > 0


SCHEDULES = (
    {"block": 32, "rows": 1, "key_tiles": 8, "value_tiles": 8, "chunk": 512, "split_tokens": 1024, "prefetch": 0},
    {"block": 256, "rows": 6, "key_tiles": 2, "value_tiles": 4, "chunk": 512, "prefetch": 0},
    {"block": 64, "rows": 4, "key_tiles": 2, "value_tiles": 1, "chunk": 128, "split_tokens": 1024},
    {"block": 512, "rows": 3, "key_tiles": 8, "value_tiles": 8, "chunk": 256, "split_tokens": 1024},
    {"block": 96, "rows": 8, "key_tiles": 8, "value_tiles": 4},  # against hints: a block between doublings, too many sums
    {"block": 192, "rows": 1, "key_tiles": 1, "value_tiles": 1, "split_tokens": 16384},  # too few
)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"block{s['block']}")
def test_every_schedule_is_right(schedule: dict[str, int]) -> None:
    spec = spec_of(heads="6/1", dim=128, k="4c32", v="4t64")
    check(variant(spec, tuple(schedule.items())), "cpu", CheckPolicy(long_tokens=2500, steps=1, most_tokens=1 << 13))


# --- appending -------------------------------------------------------------------------------------------------------


def draw(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def agrees(v: Variant, cache: KVCache, oracle: ReferenceCache) -> None:
    """Lengths, blocks and residual of a cache are those of the reference."""
    assert torch.equal(cache.lengths, oracle.lengths)
    k, val = v.unpack(cache)
    want_k, want_v = oracle.keys_values()
    for b, length in enumerate(oracle.lengths.tolist()):
        for got, want in ((k, want_k), (val, want_v)):
            assert relative_l2(got[b, :length], want[b, :length]) <= tolerance(v.dtype)
    rows = oracle.rows
    for b, length in enumerate(oracle.lengths.tolist()):
        held = [rows.row(position) for position in (*range(min(length, rows.sink)), *range(rows.first(length), length))]
        for mine, want in zip((cache.k_residual, cache.v_residual), oracle.residual(), strict=True):
            assert torch.equal(mine[b][:, held], want[b][:, held])


def fresh_cache(v: Variant, room: int, seed: int) -> KVCache:
    """A cache of three sequences that holds NaN; of a paged format with shuffled pages."""
    table = pages = None
    if v.spec.cache.page:
        need = room // v.spec.cache.page
        pages = 4 * need
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
        table = order[: 3 * need].reshape(3, need).to(torch.int32)
    return poison(v.new_cache(3, room, block_table=table, pages=pages))


def live(v: Variant, calls: list[tuple[str, list[int]]], room: int, seed: int) -> None:
    """`prefill` of so many tokens per sequence, `decode` of so many query tokens, `crop` of so many per sequence: as the reference does."""
    a, sinks = v.spec.attention, learned_sinks(v.spec)
    generator = torch.Generator().manual_seed(seed)
    cache, oracle = fresh_cache(v, room, seed), ReferenceCache(v.spec, 3, v.layout.tokens)
    for name, numbers in calls:
        tokens = max(numbers)
        if name == "crop":
            cache.crop(numbers)
            oracle.crop(torch.tensor(numbers, dtype=torch.int32))
        elif name == "prefill":
            k, val = (draw(generator, 3, max(tokens, 1), a.kv_heads, a.head_dim, dtype=v.dtype) for _ in range(2))
            v.prefill(cache, k, val, numbers)
            oracle.prefill(k, val, torch.tensor(numbers))
        else:
            q = draw(generator, 3, tokens, a.q_heads, a.head_dim, dtype=v.dtype)
            k, val = (draw(generator, 3, tokens, a.kv_heads, a.head_dim, dtype=v.dtype) for _ in range(2))
            out, lse = v.decode(q, k, val, cache, out=torch.full_like(q, torch.nan), lse=True, sinks=sinks)
            want, want_lse = oracle.decode(q, k, val, sinks=sinks)
            assert relative_l2(out, want) <= tolerance(v.dtype)
            assert relative_l2(lse, want_lse) <= 1e-5
        agrees(v, cache, oracle)


@pytest.mark.parametrize("page", [0, 64])
@pytest.mark.parametrize("q_len", [1, 5, 77])
def test_a_cache_lives_like_the_reference_across_block_borders(page: int, q_len: int) -> None:
    """Chunked prefill at ragged lengths (one empty), then decoding; 77 tokens cross two borders of 32 at once."""
    v = variant(spec_of(heads="6/2", k="4c32", v="2t32", page=page, q_len=77), (("block", 32),))
    chunks = [("prefill", lengths) for lengths in ([0, 31, 70], [0, 2, 0], [0, 30, 27])]
    live(v, [*chunks, *[("decode", [q_len])] * (4 if q_len == 1 else 2)], 384, q_len)


@st.composite
def lives(draw: st.DrawFn, rollback: int, room: int) -> list[tuple[str, list[int]]]:
    """Calls over three sequences that never have more than `room` tokens, and crops that their rollback allows."""
    calls: list[tuple[str, list[int]]] = []
    lengths, longest = [0] * 3, [0] * 3
    for _ in range(draw(st.integers(1, 6))):
        left = room - max(lengths)
        name = draw(st.sampled_from(["prefill", "decode", "decode", "crop"]))
        if name == "crop":
            most = [length - max(0, top - rollback) for length, top in zip(lengths, longest, strict=True)]
            numbers = [draw(st.integers(0, n)) for n in most]
            lengths = [length - n for length, n in zip(lengths, numbers, strict=True)]
        elif name == "decode":
            numbers = [min(left, draw(st.sampled_from([1, 1, 2, 9, 40])))]
            lengths = [length + numbers[0] for length in lengths]
        else:
            numbers = [min(left, draw(st.one_of(st.integers(0, 60), st.integers(0, 200)))) for _ in lengths]
            lengths = [length + n for length, n in zip(lengths, numbers, strict=True)]
        longest = [max(pair) for pair in zip(lengths, longest, strict=True)]
        if name != "decode" or numbers[0]:
            calls.append((name, numbers))
    return calls


@pytest.mark.parametrize(("page", "parts"), [(64, {"sink": 5, "local": 40, "rollback": 9}), (0, {"local": 16, "rollback": 50})])
def test_any_life_with_unquantized_tokens_is_that_of_the_reference(page: int, parts: dict[str, int]) -> None:
    """Tokens that were taken back are followed by others, and blocks that were packed too early by the same."""
    spec = spec_of(heads="6/2", k="4c32", v="2t32", page=page, cache=parts, sinks=True, q_len=2)
    v = variant(spec, (("block", 32),))

    @settings(max_examples=25, deadline=None, database=None, derandomize=True)
    @given(lives(parts["rollback"], 384), st.integers(0, 1 << 16))
    @example([("prefill", [90, 0, 130]), ("crop", [9, 0, 9]), ("decode", [40]), ("crop", [9, 9, 1]), ("decode", [1])], 1)
    def check_life(calls: list[tuple[str, list[int]]], seed: int) -> None:
        live(v, calls, 384, seed)

    check_life()


def test_blocks_that_were_taken_back_are_packed_again_to_the_same_bytes() -> None:
    """A decoder that appends four tokens, takes three back, and appends the right ones."""
    spec = spec_of(k="4c32", v="4t32", q_len=4, cache={"sink": 3, "rollback": 3})
    v = variant(spec, (("block", 32),))
    k, val = (draw(torch.Generator().manual_seed(4), 1, 103, 2, 64, dtype=v.dtype) for _ in range(2))
    whole, speculative = v.new_cache(1, 103), v.new_cache(1, 103)
    v.prefill(whole, k, val)
    q = torch.zeros(1, 4, 4, 64, dtype=v.dtype)
    for token in range(99):
        drafts = [torch.cat([x[:, token : token + 1], -x[:, token + 1 : token + 4]], 1) for x in (k, val)]
        v.decode(q, *drafts, speculative)
        speculative.crop(3)
    v.decode(q, k[:, 99:], val[:, 99:], speculative)
    assert whole.lengths.tolist() == speculative.lengths.tolist() == [103]
    assert torch.equal(whole.packed[:, :, :3], speculative.packed[:, :, :3])


def test_flushed_blocks_hold_the_bytes_that_packing_at_once_gives() -> None:
    spec = spec_of(k="4c32", v="4t32")
    v = variant(spec, (("block", 32),))
    k, val = (draw(torch.Generator().manual_seed(3), 1, 64, 2, 64, dtype=v.dtype) for _ in range(2))
    whole, slow = v.new_cache(1, 64), v.new_cache(1, 64)
    v.prefill(whole, k, val)
    q = torch.zeros(1, 1, 4, 64, dtype=v.dtype)
    for token in range(64):
        v.decode(q, k[:, token : token + 1], val[:, token : token + 1], slow)
    truth = pack_blocks(v.layout, to_blocks(k, 32), to_blocks(val, 32))
    want = unpack_blocks(v.layout, truth)
    for cache in (whole, slow):
        got = unpack_blocks(v.layout, cache.packed)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, want, strict=True))


@pytest.mark.parametrize("packed", [False, True])
def test_attention_of_a_whole_prompt_is_causal(packed: bool) -> None:
    """Either all tokens come with the call, or they are in the cache already."""
    spec = spec_of(heads="4/2", k="16", v="16", q_len=333)
    v = variant(spec)
    generator = torch.Generator().manual_seed(9)
    q = draw(generator, 2, 333, 4, 64, dtype=v.dtype)
    k, val = (draw(generator, 2, 333, 2, 64, dtype=v.dtype) for _ in range(2))
    cache = v.new_cache(2, 333)
    if packed:
        v.prefill(cache, k, val)
        out, lse = v.attend(q, cache, lse=True)
    else:
        out, lse = v.decode(q, k, val, cache, lse=True)
    want, want_lse = attend(q, k, val)
    assert relative_l2(out, want) <= tolerance(v.dtype)
    assert relative_l2(lse, want_lse) <= 1e-5


def test_queries_before_the_first_token_see_nothing() -> None:
    v = variant(spec_of(q_len=4), ())
    cache = v.new_cache(2, 64)
    k = draw(torch.Generator().manual_seed(1), 2, 2, 2, 64, dtype=v.dtype)
    v.prefill(cache, k, k, [0, 2])
    q = torch.ones(2, 4, 4, 64, dtype=v.dtype)
    out, lse = v.attend(q, cache, out=torch.full_like(q, torch.nan), lse=True)
    assert (out[0] == 0).all()
    assert (out[1, :2] == 0).all()
    assert (lse[0] == -torch.inf).all()
    assert torch.isfinite(lse[1, :, 2:]).all()


def test_results_do_not_depend_on_threads() -> None:
    v = variant(spec_of(k="4c32", v="4t32"), (("split_tokens", 1024),))
    k, val = (draw(torch.Generator().manual_seed(i), 1, 5000, 2, 64, dtype=v.dtype) for i in (1, 2))
    cache = v.new_cache(1, 5000)
    v.prefill(cache, k, val)
    q = draw(torch.Generator().manual_seed(4), 1, 1, 4, 64, dtype=v.dtype)
    assert v.module.set_threads is not None
    results = []
    for threads in (1, os.cpu_count() or 1, 0, 1):
        v.module.set_threads(threads)
        results.append(v.attend(q, cache))
    v.module.set_threads(0)
    assert all(torch.equal(result, results[0]) for result in results)


def test_codes_survive_extremes() -> None:
    """Values that overflow a half-precision scale, groups of one value, and denormal ranges read back like the reference's."""
    spec = spec_of(dtype="bfloat16", k="4c32", v="8t64s")
    v = variant(spec, (("block", 32),))
    k, val = (draw(torch.Generator().manual_seed(i), 1, 32, 2, 64, dtype=v.dtype) for i in (5, 6))
    k[..., 0] = 3e38
    k[..., 1] *= 3e37
    k[..., 2] = -1.5
    k[..., 3] *= 1e-8
    val[:, 0] = 0
    val[:, 1] *= 1e30
    cache = v.new_cache(1, 32)
    v.prefill(cache, k, val)
    got = unpack_blocks(v.layout, cache.packed, v.dtype)
    want = unpack_blocks(v.layout, pack_blocks(v.layout, to_blocks(k, 32), to_blocks(val, 32)), v.dtype)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, want, strict=True))


def test_a_range_beyond_float32_saturates_the_scale() -> None:
    spec = spec_of(dtype="float32", k="4c32", v="4t32")
    v = variant(spec, (("block", 32),))
    k, val = (draw(torch.Generator().manual_seed(i), 1, 32, 2, 64, dtype=v.dtype) for i in (5, 6))
    k[0, 0, :, 3], k[0, 1, :, 3] = 3e38, -3e38
    cache = v.new_cache(1, 32)
    v.prefill(cache, k, val)
    kept = meaningful_bytes(v.layout)
    want = pack_blocks(v.layout, to_blocks(k, 32), to_blocks(val, 32))
    assert torch.equal(cache.packed[..., kept], want[..., kept])


def test_the_scale_of_zeros_is_zero_without_a_sign() -> None:
    """To the bit, as other back ends store it."""
    spec = spec_of(k="8c32s", v="8t1s")
    v = variant(spec, (("block", 32),))
    k, val = (draw(torch.Generator().manual_seed(i), 1, 32, 2, 64, dtype=v.dtype) for i in (5, 6))
    k[..., 3], val[:, ::4] = 0.0, 0.0
    cache = v.new_cache(1, 32)
    v.prefill(cache, k, val)
    kept = meaningful_bytes(v.layout)
    want = pack_blocks(v.layout, to_blocks(k, 32), to_blocks(val, 32))
    assert torch.equal(cache.packed[..., kept], want[..., kept])


# --- mistakes of callers ---------------------------------------------------------------------------------------------


def calls(spec: KernelSpec) -> tuple[Variant, KVCache, torch.Tensor, torch.Tensor]:
    v = variant(spec, (("block", 32),))
    cache = v.new_cache(2, 64)
    att, dtype = spec.attention, torch_dtype(spec.attention.dtype)
    return v, cache, torch.zeros(2, 1, att.q_heads, att.head_dim, dtype=dtype), torch.zeros(2, 1, att.kv_heads, att.head_dim, dtype=dtype)


def tensors(cache: KVCache) -> tuple[torch.Tensor | None, ...]:
    """What modules take of a cache, in the order of their arguments."""
    return cache.packed, cache.k_residual, cache.v_residual, cache.lengths, cache.block_table, None


def test_the_module_refuses_wrong_tensors_in_one_sentence() -> None:
    v, cache, q, _ = calls(spec_of())
    rest = (torch.empty_like(q), None, None, v.workspace(cache), None, 1.0, 64)
    good = (q, *tensors(cache), *rest)
    v.module.attend(*good)
    for place, wrong, message in (
        (0, q.float(), "attend: q must be float16, is float32"),
        (0, q[:, :, :3], "attend: q has size 3 in dimension 2, must be 4"),
        (0, q[0], "attend: q must have 4 dimensions, has 3"),
        (0, q.transpose(2, 3).contiguous().transpose(2, 3), "attend: q must be contiguous in its last dimension"),
        (1, cache.packed[:, :, :, :-128], "attend: packed has size"),
        (1, cache.packed[:, :, ::2], "attend: packed must be contiguous"),
        (4, cache.lengths.long(), "attend: lengths must be int32, is int64"),
        (5, torch.zeros(2, 2, dtype=torch.int32), "block_table must be none: this kernel was built for a contiguous cache"),
        (6, cache.lengths, "residual_slots must be none: residuals lie in the order of sequences"),
        (7, None, "attend: out must be a tensor"),
        (9, torch.zeros(4), "attend: sinks must be none: this kernel has no learned sinks"),
        (13, 0.5, "attend: max_len must be an int"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            v.module.attend(*good[:place], wrong, *good[place + 1 :])
    with pytest.raises(TypeError, match="attend takes 14 arguments, got 3"):
        v.module.attend(*good[:3])
    with pytest.raises(TypeError, match="set_threads takes 1 arguments, got 2"):
        v.module.set_threads(1, 2)
    with pytest.raises(ValueError, match="set_threads: n is -1, must be at least 0"):
        v.module.set_threads(-1)


def test_memory_that_is_read_as_numbers_must_be_aligned() -> None:
    v, cache, q, _ = calls(spec_of())
    rest = (None, None, torch.empty(64, dtype=torch.uint8)[1:], None, 1.0, 64)
    with pytest.raises(ValueError, match="attend: workspace must start at a multiple of 4 bytes"):
        v.module.attend(q, *tensors(cache), torch.empty_like(q), *rest)
    packed = torch.zeros(cache.packed.numel() + 1, dtype=torch.uint8)[1:].view(cache.packed.shape)
    moved = (packed, *tensors(cache)[1:])
    with pytest.raises(ValueError, match="attend: packed must start at a multiple of 2 bytes"):
        v.module.attend(q, *moved, torch.empty_like(q), None, None, v.workspace(cache), None, 1.0, 64)
    k = torch.zeros(2, 8, 2, 64, dtype=v.dtype)
    with pytest.raises(ValueError, match="pack: packed must start"):
        v.module.pack(k, k, torch.tensor([8, 8], dtype=torch.int32), *moved, 64, 0, 1)
    with pytest.raises(ValueError, match="unpack: packed must start"):
        v.module.unpack(*moved, k, k)


def test_limits_beyond_int32_are_refused() -> None:
    """Lengths are int32, and would wrap around to negative ones."""
    v, cache, q, k = calls(spec_of())
    lengths, new = torch.tensor([5, 7], dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    rest = (torch.empty_like(q), None, None, v.workspace(cache), None, 1.0, 64)
    for message, call in (
        ("advance: limit is 1099511627776, more than", lambda: v.module.advance(lengths, None, 1, 1 << 40, 0)),
        ("advance: tokens is 2147483648, more than", lambda: v.module.advance(lengths, None, 1 << 31, (1 << 31) - 1, 0)),
        ("pack: limit is 2147483648, more than", lambda: v.module.pack(k, k, new, *tensors(cache), 1 << 31, 0, 1)),
        ("decode: limit is 2147483648, more than", lambda: v.module.decode(q, k, k, *tensors(cache), *rest, 1 << 31, 0, 1)),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert lengths.tolist() == [5, 7]
    with pytest.raises(ValueError, match="sequence 1 would have 2147483648 tokens, more than the limit of 2147483647"):
        v.module.advance(lengths, None, (1 << 31) - 7, (1 << 31) - 1, 0)


def test_crop_refuses_what_no_cache_can_have() -> None:
    v = variant(spec_of(cache={"rollback": 8}))
    for length, least, rollback, message in (
        (-5, 0, 8, "sequence 0 has a negative length"),
        (5, -1, 8, r"crop: least\[0\] is -1, must be at least 0"),
        (50, 0, 9, "crop: rollback is 9, this kernel keeps tokens for 8"),
    ):
        lengths, shortest = (torch.tensor([n], dtype=torch.int32) for n in (length, least))
        with pytest.raises(ValueError, match=message):
            v.module.crop(lengths, shortest, None, 0, rollback, 0)
        assert (lengths.item(), shortest.item()) == (length, least)


def test_the_module_refuses_lengths_that_the_cache_cannot_hold() -> None:
    v, cache, q, k = calls(spec_of())
    cache.lengths[1] = 96
    with pytest.raises(ValueError, match=r"sequence 1 would have 96 tokens, more than the cache holds \(2 blocks of 32\)"):
        v.attend(q, cache)
    cache.lengths[1] = -1
    with pytest.raises(ValueError, match="sequence 1 has a negative length"):
        v.decode(q, k, k, cache)
    many = torch.tensor([0, 2], dtype=torch.int32)
    cache.lengths.zero_()
    with pytest.raises(ValueError, match=r"new_lengths\[1\] is 2, k has 1 tokens"):
        v.module.pack(k, k, many, *tensors(cache), 64, 0, 1)


def test_the_module_refuses_pages_that_do_not_exist_and_small_workspaces() -> None:
    spec = spec_of(page=64, k="4c32", v="4t32")
    v, cache, q, k = calls(spec)
    v.prefill(cache, k.expand(2, 40, 2, 64), k.expand(2, 40, 2, 64))
    assert cache.block_table is not None
    cache.block_table[1, 0] = 7
    with pytest.raises(ValueError, match=r"block_table\[1\]\[0\] is 7, the cache has 2 pages"):
        v.attend(q, cache)
    cut = variant(spec_of(), (("split_tokens", 1024),))
    long = cut.new_cache(2, 5000)
    workspace = torch.zeros(16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="workspace has 16 bytes, this call needs"):
        cut.module.attend(q, *tensors(long), torch.empty_like(q), None, None, workspace, None, 1.0, 5000)


def test_more_threads_than_processors_are_refused() -> None:
    v = variant(spec_of())
    assert v.module.set_threads is not None
    most = os.cpu_count() or 1
    v.module.set_threads(most)
    v.module.set_threads(0)
    for count in (most + 1, 10**6, 2**31, 2**40):
        with pytest.raises(ValueError, match=f"set_threads: {count} threads are more than the machine's {most} processors"):
            v.module.set_threads(count)


@pytest.mark.parametrize("scale", [torch.nan, torch.inf, 3e38, 1e300])
def test_the_module_refuses_scales_that_float32_does_not_hold(scale: float) -> None:
    v, cache, q, _ = calls(spec_of())
    with pytest.raises(ValueError, match="attend: scale must be finite, and float32 must hold it"):
        v.module.attend(q, *tensors(cache), torch.empty_like(q), None, None, v.workspace(cache), None, scale, 64)


# --- what is not finite ----------------------------------------------------------------------------------------------

SPECIAL = {
    "int4": (spec_of(), ()),
    "plain-float32": (spec_of(dtype="float32", k="16", v="16"), ()),
    "softcap-window": (spec_of(dtype="float32", softcap=30.0, window=100), ()),
    "expanded": (spec_of(dim=48, k="2t8", v="4t12"), ()),
    "splits": (spec_of(), (("split_tokens", 1024),)),
    "integers": (spec_of(), (("dot", "int16"),)),
}


def spoiled(name: str, tokens: int = 300) -> tuple[Variant, KVCache, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A variant, its cache, queries, and a new token's K and V."""
    spec, schedule = SPECIAL[name]
    v = variant(spec, schedule)
    tokens = 2600 if schedule else tokens
    a, generator = spec.attention, torch.Generator().manual_seed(11)
    cache = v.new_cache(1, tokens + 10)
    v.prefill(cache, *(draw(generator, 1, tokens, a.kv_heads, a.head_dim, dtype=v.dtype) for _ in range(2)))
    q = draw(generator, 1, 1, a.q_heads, a.head_dim, dtype=v.dtype)
    k, val = (draw(generator, 1, 1, a.kv_heads, a.head_dim, dtype=v.dtype) for _ in range(2))
    return v, cache, q, k, val


@pytest.mark.parametrize("name", SPECIAL)
def test_a_nan_in_q_gives_nan_and_only_there(name: str) -> None:
    v, cache, q, _, _ = spoiled(name)
    clean, clean_lse = v.attend(q, cache, lse=True)
    for bad in (torch.nan, torch.inf, -torch.inf):
        wrong = q.clone()
        wrong[0, 0, 1, 3] = bad
        out, lse = v.attend(wrong, cache, lse=True)
        assert out[0, 0, 1].isnan().all()
        assert lse[0, 1, 0].isnan()
        assert torch.equal(out[0, 0, [0, 2, 3]], clean[0, 0, [0, 2, 3]])
        assert torch.equal(lse[0, [0, 2, 3]], clean_lse[0, [0, 2, 3]])


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("which", [0, 1], ids=["k", "v"])
def test_a_nan_in_a_new_token_gives_what_the_reference_gives(name: str, which: int) -> None:
    """In this step, and in later ones, from the residual."""
    v, cache, q, k, val = spoiled(name)
    new = (k, val)
    new[which][0, 0, 0, 5] = torch.nan
    length = int(cache.lengths[0]) + 1
    out = v.decode(q, *new, cache)
    again = v.attend(q, cache)
    keys, values = v.unpack(cache)
    a = v.spec.attention
    want, want_lse = attend(q, keys[:, :length], values[:, :length], softcap=a.softcap, window=a.window)
    assert want.isnan().any()
    for got in (out, again):
        assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(v.attend(q, cache, lse=True)[1].isnan(), want_lse.isnan())


def test_a_nan_among_the_learned_sinks_is_not_ignored() -> None:
    v = variant(spec_of(sinks=True))
    cache = v.new_cache(1, 64)
    k = torch.ones(1, 40, 2, 64, dtype=v.dtype)
    v.prefill(cache, k, k)
    q = torch.ones(1, 1, 4, 64, dtype=v.dtype)
    out, lse = v.attend(q, cache, lse=True, sinks=torch.tensor([0.0, torch.nan, -torch.inf, 1.0]))
    assert out[0, 0].isnan().all(-1).tolist() == lse[0, :, 0].isnan().tolist() == [False, True, False, False]
    assert out[0, 0, [0, 2, 3]].isfinite().all()


def test_scores_that_are_all_minus_infinity_see_nothing() -> None:
    """As in the reference: weights of 0, an output of 0, a logarithm of minus infinity."""
    v = variant(SPECIAL["plain-float32"][0])
    cache = v.new_cache(1, 64)
    k = torch.ones(1, 40, 2, 64)
    v.prefill(cache, k, k)
    q = torch.zeros(1, 1, 4, 64)
    q[..., 0] = -torch.inf
    q[..., 1:] = 1
    out, lse = v.attend(q, cache, lse=True)
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_scales_of_any_sign_are_those_of_the_reference(scale: float) -> None:
    v, cache, q, _, _ = spoiled("int4")
    keys, values = v.unpack(cache)
    want, want_lse = attend(q, keys, values, scale=scale)
    out, lse = v.attend(q, cache, lse=True, scale=scale)
    assert relative_l2(out, want) <= tolerance(v.dtype)
    assert relative_l2(lse, want_lse) <= tolerance(v.dtype)
