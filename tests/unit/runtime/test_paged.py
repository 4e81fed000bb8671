"""Calls over memory of the caller's: rows in any order of slots and pages, prompts beside decode steps, one workspace for all batches; and
a GPU's route for rows of many tokens, with its FlashAttention stood in for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from kvgen.format.rotation import rotate, rotate_back
from kvgen.runtime import chunks, varlen
from kvgen.runtime.calls import Variant
from kvgen.runtime.kvcache import row_of
from kvgen.runtime.paged import PagedCalls, Rows, runs_of
from kvgen.verify.reference import attend
from kvgen.verify.tolerance import relative_l2, tolerance
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
    calls.attend(q, out, calls.new_store(1, 1), Rows(int32(9), int32(0).view(1, 1)), [0, 9], scale=0.3, bounds=[9], new=(k, v))
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
    for wrong, message in (([0, 2, 1], "sequence 1 has the tokens from 2 to 1, k has 2"), ([0, 1, 3], "from 1 to 3, k has 2")):
        with pytest.raises(ValueError, match=message):
            calls.pack(k, k, int32(1, 0), store, Rows(int32(0, 0), int32(0, 1).view(2, 1), int32(1, 0)), wrong, on_device=int32(*wrong))
    starts = [0, 1, 1]
    with pytest.raises(ValueError, match=r"new_lengths\[0\] is 2, k has 1 tokens"):
        calls.pack(k, k, int32(2, 0), store, Rows(int32(0, 0), int32(0, 1).view(2, 1), int32(1, 0)), starts, on_device=int32(*starts))


# --- rows of many tokens on the route of a GPU --------------------------------------------------------------------------

ROUTES = SPECS | {
    "rotated": {"k": "4t64~32", "v": "8t32~16u", "cache": {"quantize": "arrival"}, "q_len": 3, "sinks": True},
    "cap": {"k": "8t64", "v": "4t32", "softcap": 5.0, "cache": {"quantize": "arrival"}, "q_len": 2},
}
ROUTES["cap without flash attention"] = ROUTES["cap"]
ROUTES["pages of two blocks"] = ROUTES["plain"]


def stand_in(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_starts: torch.Tensor,
    k_starts: torch.Tensor,
    most_q: int,
    most_k: int,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float = 0.0,
) -> varlen.Partial:
    """What a varlen kernel computes, in fp64; for a query that sees nothing an LSE of inf. Tiles of a kernel reach beyond a row's tokens,
    with weights of 0, so no V that they may read is NaN.
    """
    assert v.isfinite().all()
    out, lse = torch.full_like(q, torch.nan), torch.full((q.shape[1], len(q)), torch.nan)
    for b in range(len(q_starts) - 1):
        mine, held = slice(*q_starts[b : b + 2].tolist()), slice(*k_starts[b : b + 2].tolist())
        count, tokens = mine.stop - mine.start, held.stop - held.start
        assert count <= most_q
        assert tokens <= most_k
        keys, values = (x[held].double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[mine].double(), keys) * scale
        scores = softcap * (scores / softcap).tanh() if softcap else scores
        behind = torch.arange(tokens) - torch.arange(tokens - count, tokens).unsqueeze(1)
        if causal:
            scores.masked_fill_((behind > 0) | (behind <= -(window or MAX_LEN)), -torch.inf)
        part = torch.logsumexp(scores, -1)
        weights = (scores - part.masked_fill(part == -torch.inf, 0.0).unsqueeze(-1)).exp()
        out[mine], lse[:, mine] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype), part.float()
    return out, lse.masked_fill(lse == -torch.inf, torch.inf)


def routed(kernel: Variant, name: str) -> PagedCalls:
    """Calls on a CPU that take a GPU's route."""
    calls = PagedCalls(kernel, 5, MAX_LEN)
    calls._route(None, None if name.endswith("without flash attention") else partial(stand_in, softcap=kernel.spec.attention.softcap))
    return calls


@pytest.fixture
def poisoned() -> Iterator[None]:
    """New tensors without values are full of NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("scratch", ["ample", "scant"])
@pytest.mark.parametrize("name", ROUTES)
def test_rows_of_many_tokens_share_calls(name: str, scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks behind a past and prompts without one, beside steps, against fp64 over the dequantized cache; with memory for all, or for a
    page of one row.
    """
    spec = spec_of(dtype="float32", page=PAGE, **ROUTES[name])  # type: ignore[arg-type]
    kernel = variant(spec, (("block", PAGE // 2),) if name == "pages of two blocks" else ())
    random = torch.Generator().manual_seed(1)
    monkeypatch.setattr(varlen, "ROOM_STEP", 16)
    monkeypatch.setattr(chunks, "BATCH", 3)
    monkeypatch.setattr(chunks, "PASSES", 6)
    monkeypatch.setattr(varlen, "BUSY", 0)
    if scratch == "scant":
        page_bytes = 2 * 2 * 64 * 4 * PAGE
        cut = name in ("plain", "rotated")
        monkeypatch.setattr(varlen, "SCRATCH_BYTES", page_bytes if cut else 1 << 30)
        monkeypatch.setattr(varlen, "TOTAL_BYTES", page_bytes * 6)
        monkeypatch.setattr(varlen, "BUSY", 8 if cut else 0)
        monkeypatch.setattr(varlen.Varlen, "_cuts", lambda *args, **how: 1)  # modules for the CPU unpack all heads at once
    calls, sinks = routed(kernel, name), torch.tensor([0.5, -2.0, 5.0, 0.0]) if spec.attention.sinks else None
    table = torch.randperm(40, generator=random, dtype=torch.int32)[:30].view(5, 6)
    store, slots = calls.new_store(40, SLOTS), int32(5, 0, 3, 1, 6)
    store.packed.random_(256, generator=random)
    before = int32(0, 0, 0, 0, 0)
    for counts in ([70, 5, 130, 1, 200], [1, 90, 9, 66, 150], [2, 11, 7, 12, 5]):
        starts = [sum(counts[:b]) for b in range(6)]
        q, k, v = (torch.randn(starts[-1], heads, 64, generator=random) for heads in (4, 2, 2))
        after, out = before + int32(*counts), torch.full_like(q, torch.nan)
        rows = Rows(after, table, slots)
        calls.pack(k, v, int32(*counts), store, Rows(before, table, slots), starts)
        if spec.attention.window is not None:  # pages that no query of the row sees
            for b in range(len(counts)):
                table[b, : max(0, int(before[b]) - spec.attention.window + 1) // PAGE] = -1
        calls.attend(q, out, store, rows, starts, sinks=sinks, bounds=after.tolist(), scale=0.2)
        held = [torch.zeros(int(after.sum()), 2, 64) for _ in range(2)]
        ends = [0, *after.cumsum(0).tolist()]
        kernel.module.unpack(*rows.over(store), int32(*ends), *held)
        fresh = torch.full_like(q, torch.nan)
        pieces = calls.pieces(rows, starts, bounds=after.tolist(), own=True)
        calls.attend(q, fresh, store, rows, starts, sinks=sinks, bounds=after.tolist(), scale=0.2, new=(k, v), pieces=pieces)
        if pieces:
            with pytest.raises(ValueError, match="pieces are of other rows"):
                calls.attend(q, fresh.clone(), store, rows, starts, sinks=sinks, bounds=after.tolist(), scale=0.2, new=(k, v), pieces={})
        for b, count in enumerate(counts):
            mine = slice(starts[b], starts[b + 1])
            past = [x[None, ends[b] : ends[b + 1]] for x in held]
            masks = {"window": spec.attention.window, "softcap": spec.attention.softcap, "sinks": sinks}
            of_k, of_v = kernel.layout.rotations
            want = rotate_back(attend(rotate(q[None, mine], of_k), *past, after[b : b + 1], scale=0.2, **masks)[0][0], of_v)
            assert relative_l2(out[mine], want) <= tolerance(kernel.dtype), (counts, b)
            if ends[b + 1] - ends[b] == count > spec.attention.q_len and calls._varlen is not None:
                want = attend(q[None, mine], k[None, mine], v[None, mine], after[b : b + 1], scale=0.2, **masks)[0][0]
            assert relative_l2(fresh[mine], want) <= tolerance(kernel.dtype), (counts, b)
        before = after


@pytest.mark.parametrize(
    ("name", "blocks", "fit"), [("plain", 1, True), ("plain", 2, False), ("rotated", 2, True), ("unquantized", 1, False)]
)
def test_a_kernel_of_chunks_is_refused_where_none_can_be(name: str, blocks: int, fit: bool) -> None:
    kernel = variant(spec_of(dtype="float32", page=PAGE, **ROUTES[name]), (("block", PAGE // blocks),))  # type: ignore[arg-type]
    assert chunks.Chunks.fit(kernel, PAGE) == fit
    with nullcontext() if fit else pytest.raises(ValueError, match="chunks need a format without cache.sink"):
        PagedCalls(kernel, 5, MAX_LEN)._route(kernel, None)
