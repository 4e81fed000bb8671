"""Calls over memory of the caller's: rows in any order of slots and pages, prompts beside decode steps, one workspace for all batches."""

from __future__ import annotations

import pytest
import torch

from kvgen.runtime.kvcache import row_of
from kvgen.runtime.paged import PagedCalls, Rows, runs_of
from tests.support.cpu import spec_of, variant

SPECS = {
    "plain": {"k": "4c32", "v": "4t32", "q_len": 2},
    "unquantized": {"k": "8t64", "v": "4c32", "cache": {"sink": 3, "local": 40, "rollback": 4}},
    "window": {"k": "8c32", "v": "8t64", "window": 50, "sinks": True},
}
PAGE, MAX_LEN, SLOTS = 64, 384, 7


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def test_neighbours_with_as_many_tokens_are_one_call() -> None:
    assert list(runs_of([0, 1, 2, 7, 12, 12, 13])) == [(slice(0, 2), 1), (slice(2, 4), 5), (slice(4, 5), 0), (slice(5, 6), 1)]
    assert list(runs_of([0])) == []


@pytest.mark.parametrize("name", SPECS)
def test_rows_find_their_pages_and_residuals(name: str) -> None:
    """What a cache of its own gives for every row, in steps of prompts, of chunks beside decodes, of drafts, and of fewer rows."""
    spec = spec_of(dtype="float32", page=PAGE, **SPECS[name])  # type: ignore[arg-type]
    kernel, random = variant(spec), torch.Generator().manual_seed(1)
    sinks = torch.tensor([0.5, -2.0, 30.0, 0.0]) if spec.attention.sinks else None
    calls, own = PagedCalls(kernel, 8, MAX_LEN), kernel.new_cache(3, MAX_LEN)
    table = torch.randperm(40, generator=random, dtype=torch.int32).view(5, 8)[:3, : MAX_LEN // PAGE]
    store, slots = calls.new_store(40, SLOTS), int32(5, 0, 3)
    for held in (store.k_residual, store.v_residual):
        held.fill_(torch.nan)
    before = int32(0, 0, 0)
    for counts in ([70, 5, 130], [1, 1, 90], [2, 2, 2], [0, 1, 1], [1, 1, 1]):
        starts = [sum(counts[:b]) for b in range(4)]
        q, k, v = (torch.randn(starts[-1], heads, 64, generator=random) for heads in (4, 2, 2))
        after, out = before + int32(*counts), torch.full_like(q, torch.nan)
        calls.pack(k, v, int32(*counts), store, Rows(before, table, slots), starts)
        calls.attend(q, out, store, Rows(after, table, slots), starts, sinks=sinks, bounds=after.tolist())
        for b, count in enumerate(counts):
            mine, row = slice(starts[b], starts[b + 1]), row_of([own], b)[0]
            kernel.prefill(row, k[mine][None], v[mine][None])
            if count:
                want = kernel.attend(q[mine][None], row, sinks=sinks)
                torch.testing.assert_close(out[mine][None], want, rtol=1e-5, atol=1e-5)
        before = after
    free = [slot for slot in range(SLOTS) if slot not in slots]
    assert store.k_residual[free].isnan().all()
    assert store.v_residual[free].isnan().all()
    q, k, v = (torch.randn(2, heads, 64, generator=random) for heads in (4, 2, 2))
    out = torch.full_like(q, torch.nan)
    calls.decode(q, k, v, out, store, Rows(before, table, slots)[1:3], sinks=sinks)
    for b in (1, 2):
        want = kernel.decode(q[None, b - 1 : b], k[None, b - 1 : b], v[None, b - 1 : b], row_of([own], b)[0], sinks=sinks)
        torch.testing.assert_close(out[None, b - 1 : b], want, rtol=1e-5, atol=1e-5)


def test_a_prompt_without_a_past_is_exact() -> None:
    kernel = variant(spec_of(dtype="float32", page=PAGE, k="4c32", v="4t32"))
    calls = PagedCalls(kernel, 2, MAX_LEN)
    q, k, v = (torch.randn(9, heads, 64, dtype=torch.float32) for heads in (4, 2, 2))
    out = torch.empty_like(q)
    assert calls.prompt(q, k, v, out, int32(9), scale=0.3)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(2, 1)) * 0.3
    weights = scores.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    torch.testing.assert_close(
        out.double(), torch.einsum("hqk,khd->qhd", weights, v.double().repeat_interleave(2, 1)), rtol=1e-5, atol=1e-5
    )


def test_slots_that_do_not_exist_and_contiguous_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="paged format"):
        PagedCalls(variant(spec_of(dtype="float32", k="4c32", v="4t32")), 2, MAX_LEN)
    calls = PagedCalls(variant(spec_of(dtype="float32", page=PAGE, k="4c32", v="4t32")), 2, MAX_LEN)
    store, k = calls.new_store(4, 2), torch.zeros(2, 2, 64)
    with pytest.raises(ValueError, match=r"residual_slots\[1\] is 2, the cache has 2 residuals"):
        calls.pack(k, k, int32(1, 1), store, Rows(int32(0, 0), int32(0, 1).view(2, 1), int32(1, 2)), [0, 1, 2])
