"""Calls over pages, residuals and lengths that belong to the caller: a serving engine, which decides what each row of a batch is.

Nothing here owns lengths, waits for a device or reads from it. Lengths before and after a step, the block table and the residuals' slots
are given with every call, as tensors on the device; what the host has to know (how many tokens each row has in a step, and a bound of
the lengths) is given by the host. One workspace and one plan buffer of each launch serve every batch up to the largest, also in CUDA
graphs, whose replays use the same memory: which launch serves a batch depends on its size alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvgen.format.residual import residual_rows
from kvgen.runtime import checks
from kvgen.runtime.chunks import Chunks, Pieces
from kvgen.runtime.device import copied
from kvgen.runtime.extend import FLASH_CHANNELS
from kvgen.runtime.sequences import OverflowFlag
from kvgen.runtime.varlen import Flash, Queries, Varlen, torch_flash

if TYPE_CHECKING:
    from kvgen.runtime.calls import Calls
    from kvgen.runtime.executable import Executable
    from kvgen.runtime.kvcache import Tensors


@dataclass(frozen=True)
class Store:
    """What a layer holds, for all requests; shapes are those of `docs/abi.md`."""

    packed: Tensor
    """uint8 [pages, kv_heads, page / N_r, block_bytes]."""
    k_residual: Tensor
    """[slots, kv_heads, rows, head_dim], of the spec's dtype."""
    v_residual: Tensor
    scales: Tensor | None = None
    """Static scales of K and of V, float32 [2, kv_heads, head_dim]; None where blocks hold them."""


@dataclass(frozen=True)
class Rows:
    """The sequences of a call, on the device."""

    lengths: Tensor
    """int32 [batch]: before the call for `pack` and `decode`, its tokens included for `attend`. No call changes it."""
    block_table: Tensor
    """int32 [batch, max_pages]."""
    slots: Tensor | None = None
    """int32 [batch]: the residual of each sequence; None where residuals lie in the order of sequences."""

    def __getitem__(self, rows: slice) -> Rows:
        """Some of the sequences."""
        return Rows(self.lengths[rows], self.block_table[rows], None if self.slots is None else self.slots[rows])

    def over(self, store: Store) -> Tensors:
        """The tensors of a cache, in the order of a module's arguments."""
        return store.packed, store.k_residual, store.v_residual, self.lengths, self.block_table, self.slots, store.scales


@dataclass(frozen=True)
class StepPlan:
    """The work distribution of a call over `batch` rows of `q_len` tokens; it lies in the plan buffer until the next one is made."""

    launch: Executable
    batch: int
    q_len: int
    append: bool
    numbers: Tensor


def runs_of(starts: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Neighbouring rows that have equally many tokens, as (rows, tokens of each); row b has the tokens from starts[b] to starts[b + 1]."""
    first = 0
    for b in range(1, len(starts)):
        count = starts[first + 1] - starts[first]
        if b == len(starts) - 1 or starts[b + 1] - starts[b] != count:
            yield slice(first, b), count
            first = b


def residual_shape(kernel: Calls) -> tuple[int, int, int]:
    """[kv_heads, rows, head_dim] of a sequence's residual of K, and of V."""
    layout = kernel.layout
    return kernel.spec.attention.kv_heads, residual_rows(kernel.spec, layout.tokens).rows, layout.head_dim


class PagedCalls:
    """The calls of a kernel of a paged format over memory of the caller's.

    Tokens of all rows lie in one run: `q`, `k`, `v` and `out` are [tokens, heads, head_dim], of the spec's dtype, row after row. `starts`
    are batch + 1 numbers on the host: row b has the tokens from starts[b] to starts[b + 1].

    The caller orders calls that share memory: one stream on a GPU, one thread on a CPU.
    """

    def __init__(
        self,
        kernel: Calls,
        batch: int,
        max_len: int,
        device: torch.device | str | None = None,
        *,
        chunks: Calls | None = None,
        flash: Flash | None = None,
    ) -> None:
        """For steps of up to `batch` rows, whose sequences have up to `max_len` tokens, with all memory that calls need.

        On a GPU, `chunks` is a kernel of the same cache for more query tokens, which serves rows of more than a few of them; `flash` a
        varlen kernel for long ones instead of torch's flash attention (`kvgen.runtime.varlen.Flash`).

        Raises ValueError for a contiguous format, for `chunks` of another cache or of one that has none (`Chunks.fit`), and for sizes below
        1, TypeError for sizes that are no integers.
        """
        spec = kernel.spec
        if spec.cache.page is None:
            raise ValueError("PagedCalls take a kernel of a paged format (cache.layout: paged)")
        self.kernel, self.page = kernel, spec.cache.page
        self.batch, self.max_len = checks.whole("batch", batch, 1), checks.whole("max_len", max_len, 1)
        self.device = kernel._device(device)
        self.most_q = spec.attention.q_len
        self._gpu = self.device.index if self.device.type == "cuda" else None
        self._overflow = OverflowFlag(self._gpu is not None)
        self._memory = {launch: self._allocate(launch, self.batch, self.most_q) for launch in kernel._distinct}
        self._starts: dict[tuple[int, ...], Tensor] = {}
        self._varlen: Varlen | None = None
        self._chunks: Chunks | None = None
        if self._gpu is not None:
            self._route(chunks, flash)

    def _route(self, chunks: Calls | None, flash: Flash | None) -> None:
        """What serves rows of many tokens. Soft caps, which torch's flash attention lacks, and wide heads go without it."""
        attention = self.kernel.spec.attention
        if (flash or not attention.softcap) and attention.head_dim <= FLASH_CHANNELS:
            self._varlen = Varlen(self, flash or torch_flash)
        self._chunks = Chunks.of(self, chunks)

    def _allocate(self, launch: Executable, batch: int, most_q: int) -> tuple[Tensor, Tensor]:
        """The workspace and the plan buffer of a launch; sizes grow with the batch."""
        sizes = [launch.plan_size(self._gpu, batch, self.max_len, q_len) for q_len in range(1, most_q + 1)]
        workspace = launch.new_workspace(self.device, batch, self.max_len)
        return workspace, torch.empty(max(sizes), dtype=torch.int32, device=self.device)

    @property
    def page_shape(self) -> tuple[int, int, int]:
        """[kv_heads, blocks, block_bytes] of a page."""
        layout = self.kernel.layout
        return self.kernel.spec.attention.kv_heads, self.page // layout.tokens, layout.block_bytes

    def new_store(self, pages: int, slots: int) -> Store:
        """Empty memory for a layer."""
        k, v = (torch.zeros(slots, *residual_shape(self.kernel), dtype=self.kernel.dtype, device=self.device) for _ in range(2))
        return Store(torch.zeros(pages, *self.page_shape, dtype=torch.uint8, device=self.device), k, v)

    def launch(self, batch: int, q_len: int = 1) -> Executable:
        """The launch that serves a batch of this size."""
        return self.kernel.launch_for(batch, self.max_len, q_len)

    def check(self) -> None:
        """Raises CacheMismatch where a sequence had no room for a step that a GPU has run; it waits for nothing."""
        self._overflow.check()

    def plan(self, rows: Rows, q_len: int = 1, *, append: bool = False) -> StepPlan | None:
        """The plan of an `attend` (with `append` of a `decode`) for rows of `q_len` tokens, in the plan buffer; rows of length 0 take no
        part, and their output is 0. None on a CPU, whose modules plan for themselves.

        Within a CUDA graph, make it before the graph's replay: it is where the captured calls read it.
        """
        if self._gpu is None:
            return None
        batch = len(rows.lengths)
        launch = self.launch(batch, q_len)
        numbers = self._memory[launch][1]
        launch.module.plan(rows.lengths, numbers, q_len, int(append), 1, self.max_len, self._overflow.address)
        return StepPlan(launch, batch, q_len, append, numbers)

    def pack(
        self, k: Tensor, v: Tensor, counts: Tensor, store: Store, rows: Rows, starts: Sequence[int], *, on_device: Tensor | None = None
    ) -> None:
        """Append `counts[b]` tokens of each row, int32 [batch] on the device, at most those of `starts`, in one call for all rows.

        `rows.lengths` are those before. A row that has no room is not changed. `on_device` is `starts` as int32 on the device, if the
        caller has it there; else it is copied, which a CUDA graph cannot capture where rows have unequally many tokens.
        """
        batch, tokens = len(starts) - 1, starts[-1] - starts[0]
        if not tokens:
            return
        launch, given = self.launch(batch), None
        if all(end - start == tokens // batch for start, end in pairwise(starts)):
            mine = slice(starts[0], starts[-1])
            k, v = (_split(x[mine], tokens // batch) for x in (k, v))
        else:
            given = self.starts(starts) if on_device is None else on_device
        launch.module.pack(k, v, counts, given, *rows.over(store), self.max_len, self._overflow.address, 0)

    def starts(self, starts: Sequence[int]) -> Tensor:
        """Numbers on the host as int32 on the device, copied without waiting."""
        key = tuple(starts)
        if key not in self._starts:
            if len(self._starts) > 8:
                self._starts.clear()
            self._starts[key] = copied(key, torch.int32, self.device)
        return self._starts[key]

    def write(self, k: Tensor, v: Tensor, store: Store, slots: Tensor) -> None:
        """Quantize token i of `k` and `v` into slot `slots[i]`, page · page size + place in it: int64 [tokens], -1 for none. It is for
        formats with `cache.quantize` arrival, whose tokens it writes in one call, whatever rows they are of.

        Raises ValueError for another format.
        """
        write = self.kernel._distinct[0].module.write
        if write is None:
            raise ValueError("write is for formats with cache.quantize arrival")
        write(k, v, store.packed, slots, store.scales)

    def attend(
        self,
        q: Tensor,
        out: Tensor,
        store: Store,
        rows: Rows,
        starts: Sequence[int],
        *,
        scale: float | None = None,
        sinks: Tensor | None = None,
        plan: StepPlan | None = None,
        bounds: Sequence[int] | None = None,
        new: tuple[Tensor, Tensor] | None = None,
        pieces: Mapping[tuple[int, int], Pieces] | None = None,
    ) -> None:
        """Fill `out` with causal attention of each row's tokens, the last ones of its sequence, which are packed already.

        `rows.lengths` count them. `plan` is used by the calls that it was made for. `bounds` are numbers on the host that the lengths do
        not exceed, by default `max_len`: they size the memory of rows of more than `attention.q_len` tokens, which a GPU dequantizes, at
        most 64 MiB of a row and 256 MiB of all at a time. `new` is K and V of the tokens: a row that has no others, by its bound, attends
        over these, which is exact; without it, over what the cache holds of them. `pieces` are those of the same rows, starts and bounds,
        which all layers of a step have in common; without them they are made here. Raises ValueError for pieces of other rows.

        A kernel serves neighbours with equally many tokens, if these are few, in one call, and torch's flash attention (or `flash`) all
        neighbours with many.
        """
        bounds = [self.max_len] * (len(starts) - 1) if bounds is None else bounds
        pieces = self.pieces(rows, starts, bounds=bounds, own=new is not None) if pieces is None else pieces
        for part, kind in self._kinds(starts, bounds, own=new is not None):
            mine, tokens = slice(starts[part.start], starts[part.stop]), starts[part.start + 1] - starts[part.start]
            if isinstance(kind, int):
                queries, outputs = (_split(x[mine], tokens) for x in (q, out))
                planned = self._planned(plan, part.stop - part.start, tokens, append=False)
                self._attend(queries, None, outputs, rows[part].over(store), scale, sinks, planned, max(bounds[part]))
                continue
            if kind == "own" and new is not None and self._varlen is None:
                out[mine] = _causal(q[mine], new[0][mine], new[1][mine], self.kernel.scale if scale is None else scale)
                continue
            given = self.starts([at - mine.start for at in starts[part.start : part.stop + 1]])
            counts = [end - start for start, end in pairwise(starts[part.start : part.stop + 1])]
            of_rows = Queries(q[mine], out[mine], given, counts, self.kernel.scale if scale is None else scale, sinks)
            if kind == "chunks":
                assert self._chunks is not None
                if (part.start, part.stop) not in pieces:
                    raise ValueError("pieces are of other rows: make them for every step, with the same starts, bounds and `own`")
                self._chunks.attend(of_rows, store, pieces[part.start, part.stop])
                continue
            assert self._varlen is not None
            if kind == "own" and new is not None:
                self._varlen.own(of_rows, new[0][mine], new[1][mine])
            else:
                self._varlen.cached(of_rows, store, rows[part], bounds[part])

    def pieces(
        self, rows: Rows, starts: Sequence[int], *, bounds: Sequence[int] | None = None, own: bool = False
    ) -> dict[tuple[int, int], Pieces]:
        """What `attend` computes of lengths and pages alone, for rows of a few more than `attention.q_len` tokens on a GPU. `own`: whether
        `attend` is given `new`.
        """
        bounds = [self.max_len] * (len(starts) - 1) if bounds is None else bounds
        found = {}
        for part, kind in self._kinds(starts, bounds, own=own):
            if kind == "chunks" and self._chunks is not None:
                counts = [end - start for start, end in pairwise(starts[part.start : part.stop + 1])]
                found[part.start, part.stop] = self._chunks.pieces(counts, rows[part], bounds[part])
        return found

    def _kinds(self, starts: Sequence[int], bounds: Sequence[int], *, own: bool) -> Iterator[tuple[slice, int | str]]:
        """Neighbouring rows that one call serves, and what does: a kernel of that many tokens, or a method of another name."""
        kinds = [self._kind(end - start, bound, own=own) for (start, end), bound in zip(pairwise(starts), bounds, strict=True)]
        first = 0
        for b in range(1, len(kinds) + 1):
            if b == len(kinds) or kinds[b] != kinds[first] or (kinds[b] == "own" and self._varlen is None):
                if kinds[first]:
                    yield slice(first, b), kinds[first]
                first = b

    def _kind(self, count: int, bound: int, *, own: bool) -> int | str:
        found = self._varlen is not None
        if count <= self.most_q:
            return count
        if own and count == bound and (found or (self._gpu is None and self._plain)):
            return "own"
        if self._chunks is not None and (self._chunks.serves(count) or not found):
            return "chunks"
        return "cached" if found else count

    @property
    def _plain(self) -> bool:
        """Whether torch's attention on a CPU computes the same."""
        attention = self.kernel.spec.attention
        return attention.window is None and not attention.softcap and not attention.sinks

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        store: Store,
        rows: Rows,
        *,
        scale: float | None = None,
        sinks: Tensor | None = None,
        plan: StepPlan | None = None,
    ) -> None:
        """Append as many tokens of each row as the rows have in common, and attend, in one launch. `rows.lengths` are those before.

        Blocks that are due are packed after attention, so no row may read a block that another row fills in the same step.
        """
        batch = len(rows.lengths)
        q, k, v, out = (_split(x, len(x) // batch) for x in (q, k, v, out))
        self._attend(q, (k, v), out, rows.over(store), scale, sinks, self._planned(plan, batch, q.shape[1], append=True), self.max_len)

    # --- one call of a module --------------------------------------------------------------------------------------------

    def _planned(self, plan: StepPlan | None, batch: int, q_len: int, *, append: bool) -> StepPlan | None:
        """The plan, if it is of this call."""
        return plan if plan is not None and (plan.batch, plan.q_len, plan.append) == (batch, q_len, append) else None

    def _attend(
        self,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        out: Tensor,
        cache: Tensors,
        scale: float | None,
        sinks: Tensor | None,
        plan: StepPlan | None,
        bound: int,
    ) -> None:
        batch, tokens = q.shape[:2]
        launch = self.launch(batch, min(tokens, self.most_q)) if plan is None else plan.launch
        scale = self.kernel.scale if scale is None else scale
        flag = self._overflow.address
        if tokens > self.most_q:
            from kvgen.runtime import extend

            attention = self.kernel.spec.attention
            shape = attention.softcap, attention.window, self.kernel.layout.rotations
            call = extend.Call(q, new, out, None, sinks, scale, bound, self.max_len, flag, *shape, advance=False, waits=False)
            extend.run(launch.module, cache, call)
            return
        rest = (out, None, sinks, self._memory[launch][0], None if plan is None else plan.numbers, scale, self.max_len)
        launch.run(q, new, cache, rest, self.max_len, flag, advance=False)


def _split(x: Tensor, tokens: int) -> Tensor:
    """[rows * tokens, heads, head_dim] as [rows, tokens, heads, head_dim], in the same memory."""
    return x.view(-1, tokens, *x.shape[1:])


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of [tokens, heads, head_dim], by torch."""
    heads = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    attend = torch.nn.functional.scaled_dot_product_attention
    found = attend(heads[0], heads[1], heads[2], is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return found.squeeze(0).transpose(0, 1)
