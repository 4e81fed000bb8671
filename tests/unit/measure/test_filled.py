"""The reference over a filled cache is attention over what that cache unpacks to."""

from __future__ import annotations

import pytest
import torch

from kvgen.runtime.module import load
from kvgen.runtime.variant import Variant
from kvgen.spec import KernelSpec
from kvgen.verify.attention import attend
from kvgen.verify.data import learned_sinks
from kvgen.verify.filled import FilledCache, Kept, pattern_of
from kvgen.verify.packing import unpack_blocks
from tests.support.cpu import spec_of
from tests.support.cpu import variant as compiled
from tests.support.naive import naive_artifact, naive_layout, naive_spec


def naive(paged: bool = False) -> Variant:
    spec = naive_spec(paged)
    return Variant(spec, naive_layout(spec), load(naive_artifact().path))


def contents(filled: FilledCache, b: int, length: int) -> list[torch.Tensor]:
    """K and V of a sequence by the packed bytes themselves: fp64 [1, length, kv_heads, dim]."""
    cache, layout = filled.cache, filled.layout
    blocks = cache.packed[b] if cache.block_table is None else cache.packed[cache.block_table[b].long()].transpose(0, 1).flatten(1, 2)
    packed = unpack_blocks(layout, blocks.contiguous(), cache.k_residual.dtype)
    rows = filled.rows
    sinks = [rows.row(position) for position in range(min(length, rows.sink))]
    newest = [rows.row(position) for position in range(rows.first(length), length)]
    parts = [
        [residual[b][:, sinks].double(), x[:, : rows.packed_blocks(length)].flatten(1, 2), residual[b][:, newest].double()]
        for x, residual in zip(packed, (cache.k_residual, cache.v_residual), strict=True)
    ]
    return [torch.cat(part, 1).transpose(0, 1)[None] for part in parts]


UNQUANTIZED = spec_of(k="4c64", sinks=True, cache={"sink": 5, "local": 40, "rollback": 9})


@pytest.mark.parametrize(
    "spec", [naive_spec(), naive_spec(paged=True), spec_of(), spec_of(page=64, window=70, softcap=20.0), UNQUANTIZED], ids=str
)
@pytest.mark.parametrize("new_tokens", [0, 3])
def test_reference_by_counts_is_attention_over_all_tokens(spec: KernelSpec, new_tokens: int) -> None:
    variant = naive(spec.cache.page is not None) if spec.name == "naive" else compiled(spec)
    tokens, a = variant.layout.tokens, spec.attention
    lengths = [6 * tokens + 7, 0, 1, tokens, 9 * tokens - 1]
    filled = FilledCache(variant, len(lengths), 9 * tokens, "cpu")
    sinks = learned_sinks(spec)
    q = torch.randn(len(lengths), 3, a.q_heads, a.head_dim).to(variant.dtype)
    k, v = (torch.randn(len(lengths), 3, a.kv_heads, a.head_dim).to(variant.dtype) for _ in range(2))
    out, lse = filled.attend(q, lengths, (k, v) if new_tokens else None)
    for b, length in enumerate(lengths):
        held = contents(filled, b, length)
        if new_tokens:
            held = [torch.cat([x, new[b : b + 1].double()], 1) for x, new in zip(held, (k, v), strict=True)]
        want, want_lse = attend(q[b : b + 1], *held, softcap=a.softcap, window=a.window, sinks=sinks)
        torch.testing.assert_close(out[b : b + 1], want, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(lse[b : b + 1], want_lse, rtol=1e-9, atol=1e-12)


def test_no_two_sequences_and_no_two_neighbouring_blocks_hold_the_same() -> None:
    filled = FilledCache(naive(), 5, 2000, "cpu")
    blocks = filled.cache.packed
    assert not any(torch.equal(blocks[a], blocks[b]) for a in range(5) for b in range(a))
    assert not any(torch.equal(blocks[0, 0, i], blocks[0, 0, i + 1]) for i in range(blocks.shape[2] - 1))
    assert not torch.equal(filled.cache.k_residual[0], filled.cache.k_residual[1])


def test_copies_hold_the_same_and_what_decode_left_can_be_undone() -> None:
    variant = naive(paged=True)
    filled = FilledCache(variant, 2, 300, "cpu")
    filled.set([40, 33])
    copy = filled.copy(variant)
    assert all(torch.equal(a, b) for a, b in zip(filled.cache.tensors, copy.tensors, strict=True) if a is not None)
    q, k = torch.zeros(2, 1, 4, 32), torch.ones(2, 1, 2, 32)
    variant.decode(q, k, k, copy)
    assert not torch.equal(copy.k_residual, filled.cache.k_residual)
    filled.restore(copy)
    assert torch.equal(copy.k_residual, filled.cache.k_residual)


def test_kept_caches_are_given_again_and_the_oldest_goes_when_room_is_short() -> None:
    variant, cpu = naive(), torch.device("cpu")
    kept = Kept(1 << 40)
    first = kept.get(variant, 2, 300, cpu)
    assert kept.get(variant, 2, 300, cpu) is first
    assert kept.get(variant, 3, 300, cpu).pattern is first.pattern
    assert pattern_of(variant, cpu) is first.pattern
    tight = Kept(0)
    first = tight.get(variant, 2, 300, cpu)
    tight.get(variant, 3, 300, cpu)
    assert tight.get(variant, 2, 300, cpu) is not first
