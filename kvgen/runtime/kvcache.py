"""A quantized KV cache: its tensors, the memory for them, and one sequence of a batch as a cache of its own."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvgen.errors import CacheMismatch
from kvgen.format.dtypes import torch_dtype
from kvgen.format.residual import cache_id, most_rollback, residual_rows, window_places
from kvgen.runtime import checks
from kvgen.runtime.module import Module
from kvgen.runtime.sequences import Sequences

if TYPE_CHECKING:
    from kvgen.format.layout import PackedLayout
    from kvgen.spec import KernelSpec

Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""packed, k_residual, v_residual, lengths, block_table, residual_slots and static scales of a cache; a `KVCache` has no slots."""
HUGE_PAGE = 2 << 20


@dataclass(eq=False)
class KVCache:
    """Quantized keys and values of `batch` sequences; shapes are those of `docs/abi.md`.

    Lengths stay on the device. Several caches may have the same sequences (`new_cache(like=...)`): the layers of a model, whose lengths
    advance once per step. Calls over such caches run one after the other, from whichever thread or stream they come.
    """

    packed: Tensor
    k_residual: Tensor
    v_residual: Tensor
    layout_id: str
    block_tokens: int
    """Tokens of a packed block, N_r."""
    sequences: Sequences
    scales: Tensor | None = None
    """Static scales of K and of V, float32 [2, kv_heads, head_dim]; None where blocks hold scales. They stay as they are once tokens are
    packed."""
    device: torch.device = field(init=False)
    gpu: int | None = field(init=False)
    """Index of the GPU that holds the tensors; None on the CPU."""

    def __post_init__(self) -> None:
        self.device = self.packed.device
        self.gpu = self.sequences.gpu
        self.sequences.layers.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy. Caches that are deeply copied together share their sequences again; a shallow copy is the same layer."""
        self.__dict__.update(state)
        self.sequences.layers.add(self)

    def __repr__(self) -> str:
        """Reads nothing from the device."""
        known = f"batch={self.batch}, max_len={self.max_len}, bound={self.bound}, packed={list(self.packed.shape)}"
        return f"KVCache({known}, nbytes={self.nbytes}, device={str(self.device)!r}, layout_id={self.layout_id!r})"

    @property
    def tensors(self) -> Tensors:
        """The tensors of a cache, in the order of a module's arguments."""
        return self.packed, self.k_residual, self.v_residual, self.sequences.lengths, self.sequences.block_table, None, self.scales

    @property
    def nbytes(self) -> int:
        """Bytes of packed blocks and residuals."""
        return sum(t.numel() * t.element_size() for t in (self.packed, self.k_residual, self.v_residual))

    @property
    def lengths(self) -> Tensor:
        """Tokens of every sequence, int32 [batch] on the device."""
        return self.sequences.lengths

    @property
    def block_table(self) -> Tensor | None:
        """Pages of every sequence, int32 [batch, max_pages]; None where the cache is contiguous."""
        return self.sequences.block_table

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.sequences.batch

    @property
    def max_len(self) -> int:
        """Most tokens of a sequence."""
        return self.sequences.max_len

    @property
    def bound(self) -> int:
        """No length exceeds it, as far as the host knows; `max_len` once a change of lengths was captured in a CUDA graph."""
        return self.sequences.longest

    @bound.setter
    def bound(self, tokens: int) -> None:
        self.sequences.bound = tokens

    def advance(self, tokens: int | Tensor | Sequence[int]) -> None:
        """Add tokens to the lengths: the end of a step over a plan, or of `prefill(advance=False)` in every layer.

        A number is added to every sequence that has tokens; a sequence without any takes no part in a step. Numbers for each sequence
        (int32 [batch] on the device, or on the host) are added as they are. A sequence that has no room keeps its length.

        Raises CacheMismatch where the host knows that a length would exceed `max_len`, TypeError or ValueError on wrong numbers.
        """
        s = self.sequences
        counts, number, known = checks.change(tokens, s.batch, s.max_len, "max_len", s.lengths.device)
        with s.in_order():
            s.check()
            bound = s.max_len if known is None else s.after(max(known), counts)
            s.module.advance(s.lengths, counts, number, s.max_len, s.overflow.address)
            empty = counts is None and s.uniform and s.bound == 0 and not s.captured  # these stay empty
            s.appended(0 if empty else bound, uniform=known is not None and len(set(known)) == 1)

    def crop(self, tokens: int | Tensor | Sequence[int]) -> None:
        """Take back the newest tokens of the sequences: those that speculative decoding rejected, for example.

        A number is taken from every sequence that has tokens; numbers for each sequence (int32 [batch] on the device, or on the host)
        from each its own. With `cache.quantize` arrival any number may be. Else no sequence may become shorter than `cache.rollback`
        tokens below the longest that it has been since it was last empty: crops without new tokens between them count together. The device
        checks that, so in replays of a CUDA graph it holds too: a sequence that would become shorter keeps its length, and the next call
        over the cache raises. On the CPU `crop` itself raises, and changes nothing.

        Raises ValueError where the spec has neither, and on numbers on the host that are beyond it; CacheMismatch where an
        earlier crop on a GPU was; TypeError on wrong types.
        """
        s = self.sequences
        if s.least is None:
            raise ValueError("this cache cannot be cropped: its spec has no cache.rollback, the most tokens that may be taken back")
        meaning = "cache.rollback of the spec"
        counts, number, known = checks.change(tokens, s.batch, s.rollback, meaning, s.lengths.device, most=s.rollback)
        fewest = 0 if known is None else min(known)
        with s.in_order():
            s.check()
            s.module.crop(s.lengths, s.least, counts, number, s.rollback, s.cropped.address)
            s.appended(max(0, s.bound - fewest), uniform=known is not None and len(set(known)) == 1)

    def reset(self, rows: Sequence[int] | Tensor) -> None:
        """Forget every token of some sequences; their memory is kept. `rows`: numbers below `batch`, on the host or the device (int32 or
        int64); those on a GPU are not checked.

        That an earlier step had no room is still raised, as it may have been another sequence; not after a reset of all sequences by
        numbers on the host, which is `clear`. Raises TypeError or ValueError on wrong numbers.
        """
        s = self.sequences
        there = s.lengths.device if isinstance(rows, Tensor) and rows.device.type != "cpu" else torch.device("cpu")
        index, known = checks.numbers("rows", rows, None, s.batch - 1, "sequences", there, torch.int64)
        if known is not None and set(known) == set(range(s.batch)):  # also while a graph is captured, which forbids a copy from the host
            self.clear()
            return
        index = index.to(s.lengths.device)
        with s.in_order():
            for counted in s.counted:
                counted.index_fill_(0, index, 0)
            s.uniform = s.uniform and not len(index)
            s.changed(s.capturing)

    def reorder(self, index: Sequence[int] | Tensor) -> None:
        """Sequence b becomes a copy of what sequence `index[b]` was: beam search, which keeps the best continuations.

        `index` are `batch` numbers below `batch`, on the host or the device (int32 or int64); those on a GPU are not checked. Every cache
        that shares the sequences is copied, as far as its sequences reach.

        Raises ValueError on wrong numbers, and for paged caches, whose pages belong to the caller.
        """
        s = self.sequences
        if s.block_table is not None:
            raise ValueError(
                "a paged cache cannot be reordered: lengths and the tokens outside of pages belong to the row. Fill the sequences anew, or "
                "use a contiguous format"
            )
        source, _ = checks.numbers("index", index, s.batch, s.batch - 1, "sequences", s.lengths.device, torch.int64)
        with s.in_order():
            s.check()
            capturing = s.capturing
            longest = s.max_len if capturing else s.longest  # a graph may be replayed after further tokens
            for layer in s.distinct_layers():
                blocks = layer.packed[:, :, : -(-longest // layer.block_tokens)]
                for tensor in (blocks, layer.k_residual, layer.v_residual):
                    tensor.copy_(tensor[source])
            for counted in s.counted:
                counted.copy_(counted[source])
            s.changed(capturing)

    def clear(self) -> None:
        """Forget every token of all sequences, and that the device refused a change of their lengths; memory is kept."""
        s = self.sequences
        with s.in_order():
            for counted in s.counted:
                counted.zero_()
            capturing = s.capturing
            if not capturing:  # a captured call forgets nothing until the graph is replayed
                if s.whole is None:  # one sequence has the flags of all
                    s.overflow.clear(s.gpu)
                    s.cropped.clear(s.gpu)
                s.bound, s.uniform = 0, not s.captured  # replays may make lengths unequal at any time
            s.changed(capturing)


# --- one sequence of a batch -----------------------------------------------------------------------------------------------


def row_of(caches: Sequence[KVCache], index: int, length: int | None = None) -> list[KVCache]:
    """Sequence `index` of caches that share their sequences, as caches of batch 1 that share theirs: a prompt for one place of a batch.

    What is appended to them is in the batch. `length` is the sequence's, where the host knows it; otherwise the device is asked, which
    waits for it. The caches are for use until the batch's lengths change by other calls.

    Raises TypeError or ValueError on a wrong index, TypeError for something else than a sequence of caches, ValueError for caches that do
    not share their sequences.
    """
    if not isinstance(caches, Sequence) or not caches or not all(isinstance(cache, KVCache) for cache in caches):
        raise TypeError(f"row_of takes a sequence of at least one KVCache, such as [cache], not {type(caches).__name__}")
    whole = caches[0].sequences
    if any(cache.sequences is not whole for cache in caches):
        raise ValueError("rows are taken of caches that share their sequences (new_cache(like=...))")
    index = checks.whole("index", index, 0, whole.batch - 1)
    length = whole.length_of(index) if length is None else checks.whole("length", length, 0, whole.max_len)
    part = slice(index, index + 1)
    table = None if whole.block_table is None else whole.block_table[part]
    row = Sequences(
        whole.lengths[part], table, 1, whole.max_len, whole.module, whole.rollback, bound=length, workspaces=whole.row_workspaces,
        call_order=whole.call_order, whole=whole,
    )  # fmt: skip
    row.overflow, row.cropped = whole.overflow, whole.cropped
    row.least = None if whole.least is None else whole.least[part]
    return [
        KVCache(
            c.packed if table is not None else c.packed[part],
            c.k_residual[part],
            c.v_residual[part],
            c.layout_id,
            c.block_tokens,
            row,
            c.scales,
        )
        for c in caches
    ]


# --- memory ----------------------------------------------------------------------------------------------------------------


@torch.inference_mode(False)  # else nothing could be changed in place outside of that mode
def new_cache(
    spec: KernelSpec,
    layout: PackedLayout,
    module: Module,
    batch: int,
    max_len: int,
    pages: int | None,
    table: Tensor | None,
    device: torch.device,
    scales: Tensor | None = None,
) -> KVCache:
    """An empty cache without workspaces; `module` advances its lengths.

    Paged formats take a block table, int32 [batch, max_pages], into a pool of `pages` pages; without one, sequence b owns pages
    b * max_pages and following. Raises TypeError for sizes that are no integers, ValueError for sizes below 1, for a table of the wrong
    shape, and for pages of a contiguous format.
    """
    batch, max_len = checks.whole("batch", batch, 1), checks.whole("max_len", max_len, 1)
    pages = None if pages is None else checks.whole("pages", pages, 1)
    page = spec.cache.page
    if page is not None:
        table, rows = _page_table(batch, -(-max_len // page), pages, table, device)
        blocks = page // layout.tokens
    elif table is not None or pages is not None:
        raise ValueError("block_table and pages belong to paged caches, and this format is contiguous")
    else:
        rows, blocks = batch, _contiguous_blocks(spec, layout, max_len)
    sequences = Sequences(torch.zeros(batch, dtype=torch.int32, device=device), table, batch, max_len, module, most_rollback(spec))
    cache = _tensors(spec, layout, rows, blocks, sequences, scales)
    if cache.gpu is not None:
        sequences.call_order.follow(cache.gpu)  # other streams wait for the lengths and the workspace to be zero
    return cache


@torch.inference_mode(False)
def cache_like(spec: KernelSpec, layout: PackedLayout, other: KVCache, scales: Tensor | None = None) -> KVCache:
    """An empty cache whose sequences are those of `other`: another layer of the same model.

    Raises TypeError if `other` is no cache, ValueError if it has tokens, CacheMismatch if pages or blocks of the two layouts have different
    numbers of tokens, or if other numbers may be taken back.
    """
    if not isinstance(other, KVCache):
        raise TypeError(f"like must be a KVCache, not {type(other).__name__}")
    rows, _, blocks, _ = other.packed.shape
    if other.block_tokens != layout.tokens or (spec.cache.page is None) != (other.block_table is None):
        raise CacheMismatch("caches that share lengths must have blocks and pages of the same numbers of tokens")
    if other.sequences.rollback != most_rollback(spec):
        raise CacheMismatch(
            f"caches that share lengths are cropped together: their specs must have one cache.quantize and one cache.rollback, not "
            f"{other.sequences.rollback} and {most_rollback(spec)} tokens that may be taken back"
        )
    if other.block_table is not None and blocks * layout.tokens != spec.cache.page:
        raise CacheMismatch("caches that share a block table must have pages of the same number of tokens")
    if other.sequences.captured:
        raise ValueError("the cache in like has an Attention, or a captured step changes its lengths: make all layers before that")
    if other.sequences.longest:
        raise ValueError("the cache in like has tokens, which a new layer would lack: make all layers first, or call clear()")
    if other.block_table is None:
        blocks = _contiguous_blocks(spec, layout, other.max_len)
    return _tensors(spec, layout, rows, blocks, other.sequences, scales)


def _contiguous_blocks(spec: KernelSpec, layout: PackedLayout, max_len: int) -> int:
    """Blocks of a sequence: for `max_len` tokens, with a sliding window only for what steps see."""
    blocks = max(1, -(-max_len // layout.tokens))
    return min(blocks, window_places(spec, layout.tokens) or blocks)


def _tensors(spec: KernelSpec, layout: PackedLayout, rows: int, blocks: int, sequences: Sequences, scales: Tensor | None) -> KVCache:
    """The tensors of `rows` sequences or pages of `blocks` blocks each."""
    device, heads, dtype = sequences.lengths.device, spec.attention.kv_heads, torch_dtype(spec.attention.dtype)
    shape = (rows, heads, blocks, layout.block_bytes)
    residual = (sequences.batch, heads, residual_rows(spec, layout.tokens).rows, layout.head_dim)
    k, v = (torch.empty(residual, dtype=dtype, device=device) for _ in range(2))
    return KVCache(new_bytes(math.prod(shape), device).view(shape), k, v, cache_id(spec, layout), layout.tokens, sequences, scales)


def _page_table(batch: int, need: int, pages: int | None, table: Tensor | None, device: torch.device) -> tuple[Tensor, int]:
    """A checked or fresh block table on the device, and the size of its pool; `need` is the pages of a sequence."""
    if table is None:
        table = torch.arange(batch * need, dtype=torch.int32, device=device).reshape(batch, need)
        pages = pages if pages is not None else batch * need
        if pages < batch * need:
            raise ValueError(f"{batch} sequences of {need} pages need {batch * need} pages, not {pages}")
        return table, pages
    checks.plain("block_table", table)
    if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != batch or table.shape[1] < need:
        raise ValueError(f"block_table must be int32 [{batch}, {need} or more], not {table.dtype} {list(table.shape)}")
    if pages is None:
        raise ValueError("a block_table needs `pages`, the size of its pool")
    if table.device != device:
        return table.to(device), pages
    if table.stride(1) != 1:  # a copy would not see the pages that the caller assigns later
        raise ValueError(f"the pages of a sequence must be next to each other in block_table, whose strides are {list(table.stride())}")
    return table, pages


def new_bytes(count: int, device: torch.device) -> Tensor:
    """Memory of undefined content: uint8 [count]. Large memory on the CPU begins at a multiple of 2 MB, and Linux is asked for huge pages:
    attention reads a whole cache once, and most addresses in pages of 4 KB would miss the TLB.
    """
    if device.type != "cpu" or count < 2 * HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(count, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, count + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    skipped = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % HUGE_PAGE
    with suppress(OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, skipped, count // HUGE_PAGE * HUGE_PAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, offset=skipped, count=count)
