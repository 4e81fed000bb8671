"""The reference: attention in fp64, which tokens are quantized when, what attention then reads, and what formats cost."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvgen.format.layout import packed_layout
from kvgen.spec import KernelSpec, load_spec
from kvgen.verify import reference
from kvgen.verify.data import normal
from kvgen.verify.packing import dequantize, from_blocks, quantize, unpack_blocks
from kvgen.verify.reference import attend
from tests.support.reference import ReferenceCache
from tests.support.specs import base


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scale: float, softcap: float, window: int | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One query, one head, one key at a time."""
    batch, q_len, heads, dim = q.shape
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full((batch, heads, q_len), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(q_len):
                position = lengths[b] - q_len + i
                total, value = 0.0, torch.zeros(dim, dtype=torch.float64)
                for j in range(lengths[b]):
                    if j > position or (window is not None and j <= position - window):
                        continue
                    score = float(q[b, i, h].double() @ k[b, j, h * k.shape[2] // heads].double()) * scale
                    if softcap:
                        score = softcap * math.tanh(score / softcap)
                    total += math.exp(score)
                    value += math.exp(score) * v[b, j, h * k.shape[2] // heads].double()
                if sinks is not None:
                    total += math.exp(float(sinks[h]))
                if total > 0:
                    out[b, i, h], lse[b, h, i] = value / total, math.log(total)
    return out, lse


@given(
    share=st.integers(1, 3),
    q_len=st.integers(1, 4),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    softcap=st.sampled_from([0.0, 2.0]),
    window=st.sampled_from([None, 1, 3]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_a_plain_loop(
    share: int, q_len: int, lengths: list[int], softcap: float, window: int | None, with_sinks: bool, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    q = torch.randn(len(lengths), q_len, 2 * share, 8, generator=random)
    k, v = torch.randn(2, len(lengths), 9, 2, 8, generator=random)
    sinks = torch.randn(2 * share, generator=random) if with_sinks else None
    out, lse = attend(q, k, v, torch.tensor(lengths), scale=0.7, softcap=softcap, window=window, sinks=sinks)
    want, want_lse = plain(q, k, v, lengths, 0.7, softcap, window, sinks)
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-10, atol=1e-12)


def test_rows_in_pieces_are_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.randn(1, 37, 4, 16), torch.randn(1, 50, 2, 16)
    whole = attend(q, k, k)
    monkeypatch.setattr(reference, "MAX_SCORES", 300)
    for a, b in zip(whole, attend(q, k, k), strict=True):
        torch.testing.assert_close(a, b)


def test_what_sees_nothing_gives_zero() -> None:
    q, k = torch.randn(1, 3, 2, 16), torch.randn(1, 4, 2, 16)
    out, lse = attend(q, k, k, torch.tensor([2]))
    assert not out[0, 0].any()  # its position would be -1
    assert bool((lse[0, :, 0] == -torch.inf).all())
    assert bool(torch.isfinite(lse[0, :, 1:]).all())
    _, lse = attend(q, k, k, torch.tensor([0]), sinks=torch.tensor([0.5, -0.5]))
    assert lse[0, :, 0].tolist() == [0.5, -0.5]


def test_keys_and_values_that_no_query_sees_are_never_read() -> None:
    q, k, v = torch.randn(1, 2, 2, 16), torch.randn(1, 9, 2, 16), torch.randn(1, 9, 2, 16)
    want = attend(q, k[:, :8], v[:, :8], window=4)
    k[:, :3], v[:, :3] = float("nan"), float("nan")  # the first query sees the positions from 3 on
    k[:, 8:], v[:, 8:] = float("nan"), float("nan")
    for a, b in zip(attend(q, k, v, torch.tensor([8]), window=4), want, strict=True):
        assert torch.equal(a, b)


BLOCK = 32


def make(batch: int = 1, tokens: int = 200, **sections: Any) -> tuple[KernelSpec, ReferenceCache, torch.Tensor, torch.Tensor]:
    """A spec, an empty cache, and K and V to put in."""
    spec = load_spec(base(**sections))
    inputs = normal(spec, batch, tokens, seed=3)
    return spec, ReferenceCache(spec, batch, BLOCK), inputs.k, inputs.v


def quantized_blocks(x: torch.Tensor, quant: Any, boost: Any = None) -> torch.Tensor:
    """x [tokens, heads, dim] quantized in blocks from its first token; fp64."""
    heads_first = x[: x.shape[0] // BLOCK * BLOCK].transpose(0, 1)
    return dequantize(quantize(heads_first, quant, boost), quant).transpose(0, 1)


def test_decode_attends_before_it_flushes() -> None:
    spec, cache, k, v = make()
    q = torch.randn(1, 1, 4, 64).half()
    cache.prefill(k[:, :31], v[:, :31])
    out, lse = cache.decode(q, k[:, 31:32], v[:, 31:32])
    want, want_lse = attend(q, k[:, :32], v[:, :32])
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    assert cache.blocks.tolist() == [1]
    hat = quantized_blocks(k[0, :32], spec.key).unsqueeze(0), quantized_blocks(v[0, :32], spec.value).unsqueeze(0)
    assert torch.equal(cache.attend(q)[0], attend(q, *hat)[0])
    assert not torch.equal(cache.attend(q)[0], want)


def test_token_by_token_and_in_chunks_end_where_one_prefill_does() -> None:
    _, one, k, v = make(batch=2)
    one.prefill(k, v)
    for steps in ([1] * 200, [7, 25, 64, 1, 103]):
        _, other, _, _ = make(batch=2)
        at = 0
        for step in steps:
            other.prefill(k[:, at : at + step], v[:, at : at + step])
            at += step
        assert all(torch.equal(a, b) for a, b in zip(one.keys_values(), other.keys_values(), strict=True))


@pytest.mark.parametrize(
    ("cache", "length", "packed"), [({"sink": 5}, 40, (5, 37)), ({"local": 10}, 41, (0, 0)), ({"local": 10}, 42, (0, 32))]
)
def test_sink_tokens_shift_the_blocks_and_the_newest_stay_while_they_are_new(
    cache: dict[str, int], length: int, packed: tuple[int, int]
) -> None:
    spec, held, k, v = make(cache=cache)
    held.prefill(k[:, :length], v[:, :length])
    at = slice(*packed)
    for read, x, quant in zip(held.keys_values(), (k, v), (spec.key, spec.value), strict=True):
        want = x[0, :length].double()
        want[at] = quantized_blocks(x[0, at], quant)
        assert torch.equal(read[0], want)


def test_a_crop_gives_back_the_tokens_of_blocks_that_are_no_longer_due() -> None:
    spec, cache, k, v = make(batch=2, cache={"sink": 5, "local": 10, "rollback": 8})
    layout = packed_layout(spec, BLOCK, "simd")
    cache.prefill(k[:, :80], v[:, :80], torch.tensor([80, 50]))  # two blocks, and one: due at 47 and 79
    packed = cache.packed(layout)
    cache.crop(torch.tensor([3, 4]))
    assert (cache.lengths.tolist(), cache.blocks.tolist()) == ([77, 46], [1, 0])
    assert torch.equal(cache.keys_values()[0][0, 37:77], k[0, 37:77].double())
    with pytest.raises(ValueError, match="at most 8 tokens can be taken back"):
        cache.crop(torch.tensor([6, 0]))  # with the first crop more than 8
    cache.crop(torch.tensor([5, 4]))
    cache.prefill(k[:, 72:80], v[:, 72:80], torch.tensor([8, 0]))
    assert torch.equal(cache.packed(layout)[0], packed[0])
    cache.crop(torch.tensor([8, 0]))
    assert cache.lengths.tolist() == [72, 42]


@pytest.mark.parametrize("select", ["mean_abs", "range", "static"])
def test_boosted_channels_are_chosen_per_group_of_tokens_and_packed(select: str) -> None:
    spec, cache, k, v = make(key={"bits": 2, "axis": "channel", "group": 16, "boost": {"fraction": 0.25, "select": select}})
    cache.prefill(k[:, :64], v[:, :64])
    read = cache.keys_values()[0]
    assert torch.equal(read[0], quantized_blocks(k[0, :64], spec.key, spec.key.boost))
    for order in ("mma", "simd"):
        layout = packed_layout(spec, BLOCK, order)  # type: ignore[arg-type]
        assert torch.equal(from_blocks(unpack_blocks(layout, cache.packed(layout))[0]), read)
