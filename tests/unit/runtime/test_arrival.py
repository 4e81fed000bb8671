"""Tokens that are quantized as they arrive (`cache.quantize: arrival`): what a cache holds, and results, do not depend on the calls that
wrote it. `tests/unit/lower/test_cpu_module.py` compares formats with the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kvgen.runtime.calls import Variant
from kvgen.runtime.kvcache import KVCache
from kvgen.verify.calls import NAN_BYTE, poison
from kvgen.verify.packing import pack_blocks, to_blocks, token_bits
from tests.support.cpu import spec_of, variant

TOKENS = 67
SPECS = {
    "paged": spec_of(k="2t32", v="4t16s", page=32, q_len=2, dtype="bfloat16", cache={"quantize": "arrival"}),
    "contiguous": spec_of(k="4t64", v="16", cache={"quantize": "arrival"}, window=50),
}


@pytest.fixture(scope="module", params=SPECS)
def of(request: pytest.FixtureRequest) -> Variant:
    return variant(SPECS[request.param])


def data(of: Variant, batch: int, tokens: int, seed: int = 0, heads: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(batch, tokens, heads, 64, generator=draw).to(of.dtype) for _ in range(2))
    return k, v


def filled(of: Variant, k: torch.Tensor, v: torch.Tensor, pieces: Sequence[int]) -> KVCache:
    """A cache of poisoned memory whose sequences got their tokens in pieces."""
    cache, at = poison(of.new_cache(len(k), TOKENS + 5)), 0
    for piece in pieces:
        of.prefill(cache, k[:, at : at + piece], v[:, at : at + piece])
        at += piece
    return cache


def test_every_cut_of_a_prompt_gives_the_same_bytes_and_outputs(of: Variant) -> None:
    k, v = data(of, 2, TOKENS)
    q = data(of, 2, of.spec.attention.q_len, 1, heads=4)[0]
    whole = filled(of, k, v, [TOKENS])
    want = of.attend(q, whole, lse=True)
    assert not want[0].isnan().any()
    for first in range(1, 34):
        cut = filled(of, k, v, [first, 0, 1, TOKENS - first - 1])
        assert torch.equal(cut.packed, whole.packed), first
        assert all(torch.equal(mine, right) for mine, right in zip(of.attend(q, cut, lse=True), want, strict=True)), first
    steps = filled(of, k, v, [TOKENS - 6])
    for at in range(TOKENS - 6, TOKENS, q.shape[1]):
        last = of.decode(q, k[:, at : at + q.shape[1]], v[:, at : at + q.shape[1]], steps, lse=True)
    assert torch.equal(steps.packed, whole.packed)
    assert all(torch.equal(mine, right) for mine, right in zip(last, want, strict=True)), "a query sees its own token quantized"


def test_a_query_gets_the_same_bits_beside_other_queries() -> None:
    """In a prompt as in a step of its own: later tokens lie in its last sub-tile, or do not."""
    of = variant(SPECS["paged"])
    k, v = data(of, 2, TOKENS)
    q = data(of, 2, TOKENS, 1, heads=4)[0]
    whole = of.attend(q, filled(of, k, v, [TOKENS]))
    for length in (1, 2, 31, 32, 33, 48, 50, 66):
        step = of.attend(q[:, length - 1 : length], filled(of, k[:, :length], v[:, :length], [length]))
        assert torch.equal(step, whole[:, length - 1 : length]), length


def test_only_the_bits_of_a_token_are_written(of: Variant) -> None:
    k, v = data(of, 1, TOKENS)
    held = of.layout.tokens
    for start, count in ((0, 1), (15, 1), (16, 2), (31, 1), (3, 20), (0, 32)):
        cache = of.new_cache(1, held)
        cache.packed.fill_(0xA5)
        cache.lengths.fill_(start)
        cache.bound = start
        of.prefill(cache, k[:, start : start + count], v[:, start : start + count])
        number = torch.arange(held)
        mine = token_bits(of.layout, (number >= start) & (number < start + count))
        right = pack_blocks(
            of.layout, *(to_blocks(x[:, :held] if held <= TOKENS else torch.cat([x, x[:, : held - TOKENS]], 1), held) for x in (k, v))
        )
        assert torch.equal(cache.packed[0, :, 0], (right[0, :, 0] & mine) | (0xA5 & ~mine)), (start, count)


def test_slots_name_where_tokens_go(of: Variant) -> None:
    """As an engine gives them: two sequences mixed, a padding token, rows of a wider tensor."""
    k, v = data(of, 2, TOKENS)
    whole = filled(of, k, v, [TOKENS])
    room = whole.packed.shape[2] * of.layout.tokens
    cache = poison(of.new_cache(2, TOKENS + 5))
    assert of.module.write is not None
    order = [(b, at) for start, end in ((0, 3), (3, 50), (50, TOKENS)) for b in (0, 1) for at in range(start, end)]
    slots = []
    for b, at in order:
        outer = b if cache.block_table is None else int(cache.block_table[b, at // room])
        slots.append(outer * room + (at if cache.block_table is None else at % room))
    places = torch.tensor(order).T
    rows = [torch.cat([x[places[0], places[1]], torch.full_like(x[:1, 0], torch.nan)]) for x in (k, v)]
    of.module.write(*(torch.cat([x, x], 1)[:, 2:] for x in rows), cache.packed, torch.tensor([*slots, -1]), None)
    assert torch.equal(cache.packed, whole.packed)
    with pytest.raises(ValueError, match=r"slots\[0\] is .*, and packed has places for"):
        of.module.write(rows[0][:1], rows[1][:1], cache.packed, torch.tensor([cache.packed.shape[0] * room]), None)
    with pytest.raises(ValueError, match="slots has size 1 in dimension 0"):
        of.module.write(*rows, cache.packed, torch.tensor([0]), None)


def test_what_lies_behind_a_length_reaches_no_result(of: Variant) -> None:
    """Codes, scales and 16-bit numbers that are anything, before and after a crop of any number of tokens."""
    k, v = data(of, 3, TOKENS)
    q = data(of, 3, of.spec.attention.q_len, 1, heads=4)[0]
    for lengths in ([TOKENS, 33, 1], [32, 31, 17], [0, 16, 64]):
        outs = []
        for fill in (NAN_BYTE, 0, 0x7C):
            cache = of.new_cache(3, TOKENS + 5)
            cache.packed.fill_(fill)
            of.prefill(cache, k, v, lengths)
            outs.append(of.attend(q, cache))
        cache.packed.fill_(NAN_BYTE)
        cache.clear()
        of.prefill(cache, k, v)
        cache.crop([TOKENS - length for length in lengths])
        outs.append(of.attend(q, cache))
        assert all(torch.equal(out, outs[0]) for out in outs)
        assert not outs[0].isnan().any()
        k_read, _ = of.unpack(cache)
        assert not k_read.isnan().any()
