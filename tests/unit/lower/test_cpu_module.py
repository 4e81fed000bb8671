"""CPU modules against the fp64 reference: formats, schedules, what is not finite, errors of callers (`tests.lives cpu`: random calls)."""

from __future__ import annotations

import os

import pytest
import torch

from kvgen.format.dtypes import torch_dtype
from kvgen.runtime.calls import Variant
from kvgen.runtime.kvcache import KVCache
from kvgen.spec import KernelSpec
from kvgen.verify import CheckPolicy
from kvgen.verify.check import check
from kvgen.verify.packing import pack_blocks, to_blocks
from kvgen.verify.reference import attend
from kvgen.verify.tolerance import relative_l2, tolerance
from tests.support.cpu import spec_of, variant
from tests.support.packed import meaningful_bytes

POLICY = CheckPolicy(long_tokens=300, steps=2, repeats=2, most_tokens=1 << 12)

FORMATS = {
    "int4": spec_of(),
    "groups-that-fit-no-vector": spec_of(dim=48, k="2t8", v="4t12"),
    "wide-heads": spec_of(heads="2/1", dim=512, k="4c32", v="8t512"),
    "plain": spec_of(k="16", v="16", q_len=131),
    "boosted-half-by-range-paged": spec_of(dim=80, k="2c32+2range", v="4t80", page=64, q_len=3),
    "boosted-expanded-float32": spec_of(dtype="float32", k="2c48+4mean_abs", v="4t4"),
    "softcap-window": spec_of(dtype="float32", softcap=30.0, window=100),
    "sink-and-local-bfloat16": spec_of(dtype="bfloat16", k="2c32", v="8t64", page=64, cache={"sink": 5, "local": 40}),
    "rotated": spec_of(k="4c32~64", v="4t16~16u", q_len=2, cache={"sink": 3, "local": 20}),
    "rotated-boosted-rollback-float32": spec_of(dim=80, dtype="float32", k="2c32+5range~16", v="2c32~16", page=64, cache={"rollback": 4}),
    "e4m3-and-nvfp4": spec_of(k="e4m3t32", v="nvfp4@tensor", q_len=2),
    "e5m2-per-channel-bfloat16": spec_of(dim=80, dtype="bfloat16", k="e5m2c32", v="e5m2c16", page=64),
    "mxfp4-and-e4m3-float32": spec_of(dtype="float32", k="mxfp4", v="e4m3t4"),
    "static-int": spec_of(k="4@channel~64", v="8@head", page=64, q_len=2, cache={"local": 20, "rollback": 4}),
    "static-e4m3-bfloat16": spec_of(dim=80, dtype="bfloat16", k="e4m3@tensor", v="4t16"),
    "arrival": spec_of(heads="6/2", k="4t32", v="2t64", q_len=2, cache={"quantize": "arrival"}),
    "arrival-paged-bfloat16": spec_of(
        dtype="bfloat16", k="16", v="8t16s~32", page=16, window=70, softcap=20.0, sinks=True, q_len=3, cache={"quantize": "arrival"}
    ),
    "arrival-float32": spec_of(dim=80, dtype="float32", k="nvfp4@head", v="e4m3t16", cache={"quantize": "arrival"}),
    "arrival-static": spec_of(k="4@channel", v="e4m3@head", page=32, q_len=2, cache={"quantize": "arrival"}),
    "rollback-window": spec_of(k="8c32s", window=70, softcap=20.0, sinks=True, page=32, cache={"local": 33, "rollback": 5}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_right_and_packs_the_codes_of_the_reference(name: str) -> None:
    accuracy = check(variant(FORMATS[name]), "cpu", POLICY)
    assert accuracy.get("code_mismatches", 0) == 0
    assert accuracy["relative_l2"] > 0


SCHEDULES = (
    {"block": 32, "rows": 1, "key_tiles": 8, "value_tiles": 8, "chunk": 512, "split_tokens": 1024, "prefetch": 0},
    {"block": 96, "rows": 8, "key_tiles": 8, "value_tiles": 4},  # against hints: a block between doublings, too many sums
)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"block{s['block']}")
def test_every_schedule_is_right(schedule: dict[str, int]) -> None:
    spec = spec_of(heads="6/1", dim=128, k="4c32", v="4t64")
    check(variant(spec, tuple(schedule.items())), "cpu", CheckPolicy(long_tokens=2500, steps=1, most_tokens=1 << 13))


# --- appending -------------------------------------------------------------------------------------------------------


def draw(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def test_attention_of_a_whole_prompt_is_causal() -> None:
    v = variant(FORMATS["plain"])
    generator = torch.Generator().manual_seed(9)
    q = draw(generator, 2, 131, 4, 64, dtype=v.dtype)
    k, val = (draw(generator, 2, 131, 2, 64, dtype=v.dtype) for _ in range(2))
    out, lse = v.decode(q, k, val, v.new_cache(2, 131), lse=True)
    want, want_lse = attend(q, k, val)
    assert relative_l2(out, want) <= tolerance(v.dtype)
    assert relative_l2(lse, want_lse) <= 1e-5


def test_results_do_not_depend_on_threads() -> None:
    v = variant(spec_of())
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


@pytest.mark.parametrize(
    ("dtype", "k", "v"),
    [("bfloat16", "4c32", "8t64s"), ("float16", "e5m2c32", "8t1s"), ("bfloat16", "e4m3t4", "e5m2t64"), ("bfloat16", "nvfp4", "mxfp4")],
)
def test_codes_of_extremes_are_those_of_the_reference(dtype: str, k: str, v: str) -> None:
    """Ranges beyond the scale's type, groups of one value, denormal ranges, zeros of either sign: bit for bit."""
    made = variant(spec_of(dtype=dtype, k=k, v=v), (("block", 32),))
    keys, val = (draw(torch.Generator().manual_seed(i), 1, 32, 2, 64, dtype=torch.float32) for i in (5, 6))
    most = float(torch.finfo(made.dtype).max)
    keys[..., 0], keys[..., 2] = most, -1.5
    keys[..., 1] *= most / 10
    keys[..., 3] *= 1e-8
    keys[0, 0, :, 4], keys[0, 1, :, 4] = most, -most
    val[:, ::4] = 0
    val[:, 1] *= most / 10
    keys, val = keys.to(made.dtype), val.to(made.dtype)
    cache = made.new_cache(1, 32)
    made.prefill(cache, keys, val)
    kept, want = meaningful_bytes(made.layout), pack_blocks(made.layout, to_blocks(keys, 32), to_blocks(val, 32))
    assert torch.equal(cache.packed[..., kept], want[..., kept])


# --- mistakes of callers ---------------------------------------------------------------------------------------------


def calls(spec: KernelSpec) -> tuple[Variant, KVCache, torch.Tensor, torch.Tensor]:
    v = variant(spec, (("block", 32),))
    cache = v.new_cache(2, 64)
    att, dtype = spec.attention, torch_dtype(spec.attention.dtype)
    return v, cache, torch.zeros(2, 1, att.q_heads, att.head_dim, dtype=dtype), torch.zeros(2, 1, att.kv_heads, att.head_dim, dtype=dtype)


def tensors(cache: KVCache) -> tuple[torch.Tensor | None, ...]:
    """What modules take of a cache, in the order of their arguments."""
    return cache.packed, cache.k_residual, cache.v_residual, cache.lengths, cache.block_table, None, None


def behind(bytes_: torch.Tensor, offset: int) -> torch.Tensor:
    """Room for as many bytes, not at the start of an allocation."""
    return torch.zeros(bytes_.numel() + offset, dtype=torch.uint8)[offset:].view(bytes_.shape)


def test_the_module_refuses_wrong_tensors_in_one_sentence() -> None:
    v, cache, q, _ = calls(spec_of())
    rest = (torch.empty_like(q), None, None, v.workspace(cache), None, 1.0, 64)
    good = (q, *tensors(cache), *rest)
    v.module.attend(*good)
    for place, wrong, message in (
        (0, q.float(), "attend: q must be float16, is float32"),
        (0, q.transpose(2, 3).contiguous().transpose(2, 3), "attend: q must be contiguous in its last dimension"),
        (1, cache.packed[:, :, :, :-128], "attend: packed has size"),
        (1, behind(cache.packed, 2), "attend: packed must start at a multiple of 4 bytes"),
        (11, behind(good[11], 1), "attend: workspace must start at a multiple of 4 bytes"),
        (5, torch.zeros(2, 2, dtype=torch.int32), "block_table must be none: this kernel was built for a contiguous cache"),
        (7, cache.lengths, "scales must be none: blocks hold them"),
        (10, torch.zeros(4), "attend: sinks must be none: this kernel has no learned sinks"),
        (14, 0.5, "attend: max_len must be an int"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            v.module.attend(*good[:place], wrong, *good[place + 1 :])
    with pytest.raises(TypeError, match="attend takes 15 arguments, got 3"):
        v.module.attend(*good[:3])


def test_limits_beyond_int32_are_refused() -> None:
    """Lengths are int32, and would wrap around to negative ones."""
    v, cache, q, k = calls(spec_of())
    lengths, new = torch.tensor([5, 7], dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    rest = (torch.empty_like(q), None, None, v.workspace(cache), None, 1.0, 64)
    for message, call in (
        ("advance: limit is 1099511627776, more than", lambda: v.module.advance(lengths, None, 1, 1 << 40, 0)),
        ("advance: tokens is 2147483648, more than", lambda: v.module.advance(lengths, None, 1 << 31, (1 << 31) - 1, 0)),
        ("pack: limit is 2147483648, more than", lambda: v.module.pack(k, k, new, None, *tensors(cache), 1 << 31, 0, 1)),
        ("decode: limit is 2147483648, more than", lambda: v.module.decode(q, k, k, *tensors(cache), *rest, 1 << 31, 0, 1)),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert lengths.tolist() == [5, 7]
    with pytest.raises(ValueError, match="sequence 1 would have 2147483648 tokens, more than the limit of 2147483647"):
        v.module.advance(lengths, None, (1 << 31) - 7, (1 << 31) - 1, 0)


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
        v.module.pack(k, k, many, None, *tensors(cache), 64, 0, 1)


# --- what is not finite ----------------------------------------------------------------------------------------------

SPECIAL = {
    "int4": (spec_of(), ()),
    "softcap-window": (spec_of(dtype="float32", softcap=30.0, window=100), ()),
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
