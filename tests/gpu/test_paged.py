"""Calls over memory of the caller's on a GPU: prompts, further chunks, and captured steps of two batch sizes with one workspace; rows of
many tokens in few calls.
"""

from __future__ import annotations

import pytest
import torch

from kvgen.runtime import varlen
from kvgen.runtime.calls import Variant
from kvgen.runtime.kvcache import row_of
from kvgen.runtime.paged import PagedCalls, Rows, Store
from tests.gpu.oracle import normal
from tests.support.kernel_cases import KernelCase
from tests.support.kernel_cases import variant as compiled

PAGE, MAX_LEN, ROWS, SLOTS = 128, 2048, 5, 9


@pytest.fixture(scope="module")
def variant() -> Variant:
    return compiled(KernelCase("k4v4:h8/2:page128"))


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


def tokens(count: int, heads: int, seed: int) -> torch.Tensor:
    return normal(seed, 1, count, heads, 128, dtype=torch.float16)[0]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert float((got.float() - want.float()).norm() / want.float().norm()) < 2e-3


def test_rows_in_graphs_of_two_batch_sizes(variant: Variant) -> None:
    """Lengths, slots and the plan are computed before a replay, in memory that the graph reads."""
    calls, own = PagedCalls(variant, 8, MAX_LEN, "cuda"), variant.new_cache(ROWS, MAX_LEN, "cuda")
    pages = torch.randperm(100, generator=torch.Generator().manual_seed(1)).int().cuda()
    table, slots = pages[: ROWS * MAX_LEN // PAGE].view(ROWS, -1), int32(5, 0, 8, 3, 6)
    store = calls.new_store(100, SLOTS)
    counts = [900, 1, 127, 130, 300]
    starts = [sum(counts[:b]) for b in range(ROWS + 1)]
    before = torch.zeros(ROWS, dtype=torch.int32, device="cuda")
    for seed in (0, 10):  # a prompt, and a chunk behind it
        q, k, v = (tokens(starts[-1], heads, seed + at) for at, heads in enumerate((8, 2, 2)))
        after, out = before + int32(*counts), torch.full_like(q, torch.nan)
        calls.pack(k, v, int32(*counts), store, Rows(before, table, slots), starts)
        calls.attend(q, out, store, Rows(after, table, slots), starts, bounds=after.tolist())
        for b in range(ROWS):
            mine, row = slice(starts[b], starts[b + 1]), row_of([own], b)[0]
            variant.prefill(row, k[mine][None], v[mine][None])
            close(out[mine][None], variant.attend(q[mine][None], row))
        before = after
    graphs = {batch: Captured(variant, calls, store, batch) for batch in (ROWS, 3)}
    for step in range(140):
        batch = (ROWS, 3)[step % 2]
        found = graphs[batch].step(before[:batch], table[:batch], slots[:batch], step)
        for b in range(batch):
            q, k, v = (x[b : b + 1, None] for x in graphs[batch].inputs)
            row = row_of([own], b)[0]
            variant.prefill(row, k, v)
            close(found[b : b + 1, None], variant.attend(q, row))
        before[:batch] += 1
    right = graphs[ROWS].step(before, table, slots, 140).clone()
    stale = graphs[ROWS].step(before, table, slots, 140, planned=torch.ones_like(before)).clone()
    assert float((stale - right).float().norm() / right.float().norm()) > 0.1, "a replay reads the plan that was made before it"
    calls.check()


class Captured:
    """A decode step of a batch size, packed first."""

    def __init__(self, variant: Variant, calls: PagedCalls, store: Store, batch: int) -> None:
        self.calls, self.batch = calls, batch
        self.inputs = [tokens(batch, heads, 1) for heads in (8, 2, 2)]
        self.out = torch.empty_like(self.inputs[0])
        self.before, self.after, self.slots = (torch.zeros(batch, dtype=torch.int32, device="cuda") for _ in range(3))
        self.counts = torch.zeros(batch, dtype=torch.int32, device="cuda")
        self.table = torch.zeros(batch, MAX_LEN // PAGE, dtype=torch.int32, device="cuda")
        rows, starts = Rows(self.after, self.table, self.slots), list(range(batch + 1))

        def run() -> None:
            q, k, v = self.inputs
            calls.pack(k, v, self.counts, store, Rows(self.before, self.table, self.slots), starts)
            calls.attend(q, self.out, store, rows, starts, plan=plan)

        plan = calls.plan(rows)
        run()  # no row has a token: it loads the module
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            run()

    def step(
        self, before: torch.Tensor, table: torch.Tensor, slots: torch.Tensor, seed: int, planned: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The output of one more token of each row; with the plan for other lengths, if they are given."""
        for at, x in enumerate(self.inputs):
            x.copy_(tokens(self.batch, x.shape[1], 1000 * at + seed))
        self.before.copy_(before)
        self.after.copy_(before + 1)
        self.counts.fill_(1)
        self.table.copy_(table)
        self.slots.copy_(slots)
        self.calls.plan(Rows(self.after if planned is None else planned, self.table, self.slots))
        self.graph.replay()
        return self.out


@pytest.mark.parametrize(
    "words", ["k4v4:h8/2:page128", "k4v4:token:h8/2:page16:arrival:q8:krot16u", "k8v8:token:h8/2:page64:arrival:q4:window200"]
)
@pytest.mark.parametrize("scratch", ["ample", "scant"])
def test_chunks_and_prompts_of_many_rows(words: str, scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of all kinds in one step, by passes of the kernel, by flash attention over dequantized rows, and in pieces of a row; against a
    cache of their own. Repeated, the bits are equal, and the host waits for nothing.
    """
    variant = compiled(KernelCase(words))
    heads = variant.spec.attention.q_heads
    if scratch == "scant":
        monkeypatch.setattr(varlen, "SCRATCH_BYTES", 512 * 2 * 2 * 128 * 2)
        monkeypatch.setattr(varlen, "TOTAL_BYTES", 2048 * 2 * 2 * 128 * 2)
    calls, own, page = PagedCalls(variant, 8, MAX_LEN, "cuda"), variant.new_cache(ROWS, MAX_LEN, "cuda"), variant.spec.cache.page or 0
    per = MAX_LEN // page
    table = torch.randperm(ROWS * per + 9, generator=torch.Generator().manual_seed(1))[: ROWS * per].int().cuda().view(ROWS, per)
    store, slots, before = calls.new_store(ROWS * per + 9, SLOTS), int32(5, 0, 8, 3, 6), torch.zeros(ROWS, dtype=torch.int32, device="cuda")
    store.packed.random_(256)
    past = [0] * ROWS
    for step, counts in enumerate(([900, 1, 300, 20, 700], [1, 40, 100, 9, 500], [17, 64, 8, 300, 33])):
        starts = [sum(counts[:b]) for b in range(ROWS + 1)]
        q, k, v = (tokens(starts[-1], count, 10 * step + at) for at, count in enumerate((heads, 2, 2)))
        bounds = [a + b for a, b in zip(past, counts, strict=True)]
        added, given = int32(*counts), int32(*starts)
        after = before + added
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first step loads modules
        calls.pack(k, v, added, store, Rows(before, table, slots), starts, on_device=given)
        outs = []
        rows = Rows(after, table, slots)
        for new, pieces in ((None, None), (None, calls.pieces(rows, starts, bounds=bounds)), ((k, v), None)):
            outs.append(torch.full_like(q, torch.nan))
            calls.attend(q, outs[-1], store, rows, starts, bounds=bounds, new=new, pieces=pieces)
        torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(outs[0], outs[1])
        for b in range(ROWS):
            mine, row = slice(starts[b], starts[b + 1]), row_of([own], b)[0]
            variant.prefill(row, k[mine][None], v[mine][None])
            want = variant.attend(q[mine][None], row)
            close(outs[0][mine][None], want)
            assert float((outs[2][mine][None].float() - want.float()).norm() / want.float().norm()) < 0.3  # of a prompt, not quantized
        before, past = after, bounds
    calls.check()
