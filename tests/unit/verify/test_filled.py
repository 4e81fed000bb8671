"""The reference over a filled cache is attention over what that cache unpacks to; what is reserved is not touched."""

from __future__ import annotations

import resource

import pytest
import torch

from kvgen.spec import KernelSpec
from kvgen.verify.data import learned_sinks
from kvgen.verify.filled import FilledCache, SparseCache, free_bytes, reserved
from kvgen.verify.packing import unpack_blocks
from kvgen.verify.reference import attend
from tests.support.cpu import spec_of
from tests.support.cpu import variant as compiled
from tests.support.naive import naive_spec, naive_variant

CPU = torch.device("cpu")


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
    variant = naive_variant(spec.cache.page is not None) if spec.name == "naive" else compiled(spec)
    tokens, a = variant.layout.tokens, spec.attention
    lengths = [6 * tokens + 7, 0, 1, tokens, 9 * tokens - 1]
    filled = FilledCache(variant, len(lengths), 9 * tokens, "cpu")
    q = torch.randn(len(lengths), 3, a.q_heads, a.head_dim).to(variant.dtype)
    k, v = (torch.randn(len(lengths), 3, a.kv_heads, a.head_dim).to(variant.dtype) for _ in range(2))
    out, lse = filled.attend(q, lengths, (k, v) if new_tokens else None)
    for b, length in enumerate(lengths):
        held = contents(filled, b, length)
        if new_tokens:
            held = [torch.cat([x, new[b : b + 1].double()], 1) for x, new in zip(held, (k, v), strict=True)]
        want, want_lse = attend(q[b : b + 1], *held, softcap=a.softcap, window=a.window, sinks=learned_sinks(spec))
        torch.testing.assert_close(out[b : b + 1], want, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(lse[b : b + 1], want_lse, rtol=1e-9, atol=1e-12)


def test_sequences_hold_the_pattern_in_different_orders() -> None:
    blocks = FilledCache(naive_variant(), 5, 1000, "cpu").cache.packed
    assert not any(torch.equal(blocks[a], blocks[b]) for a in range(5) for b in range(a))


@pytest.mark.parametrize("paged", [False, True])
def test_a_sparse_cache_reads_as_its_marks_and_zeros(paged: bool) -> None:
    variant = naive_variant(paged)
    tokens = variant.layout.tokens
    filled = SparseCache(variant, 3, 20 * tokens, CPU, [0, 3, 18])
    packed, table = filled.cache.packed, filled.cache.block_table
    assert packed[-1].data_ptr() - packed.data_ptr() > 1 << 32
    if table is not None:
        assert table.max() == packed.shape[0] - 1 > 1 << 16
        assert table.unique().numel() == table.numel()
    filled.set([0, 0, 19 * tokens])
    want = filled.contents(2, 19)
    for mine, x in zip(variant.unpack(filled.cache), want, strict=True):
        assert torch.equal(mine[2].transpose(0, 1).double(), x)
    assert want[0].unflatten(1, (-1, tokens)).abs().sum((0, 2, 3)).nonzero().flatten().tolist() == [0, 3, 18]


def test_reserved_memory_is_zero_and_takes_none() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    x = reserved((1 << 30, 6), torch.float16, CPU)
    x[-1, -1] = 1
    assert x[:: 1 << 26].sum() == 0
    assert x[-1].tolist() == [0, 0, 0, 0, 0, 1]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_what_torch_has_cached_of_a_gpus_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after many workloads, whose caches were of different sizes: the driver has little left, and torch gives its part back."""
    for name, answer in (("mem_get_info", (5, 140)), ("memory_reserved", 120), ("memory_allocated", 20)):
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    assert free_bytes(torch.device("cuda")) == 105
