"""One sequence of a batch as a cache of its own, over the same memory: a prompt for one place of a batch, a sequence of another length."""

from __future__ import annotations

from collections.abc import Sequence

from kvgen.runtime import checks
from kvgen.runtime.kvcache import KVCache
from kvgen.runtime.sequences import Sequences


def row_of(caches: Sequence[KVCache], index: int, length: int | None = None) -> list[KVCache]:
    """Sequence `index` of caches that share their sequences, as caches of batch 1 that share theirs.

    What is appended to them is in the batch. `length` is the sequence's, where the host knows it; otherwise the device is asked, which
    waits for it. The caches are for use until the batch's lengths change by other calls.

    Raises TypeError or ValueError on a wrong index, TypeError for something else than a sequence of caches, ValueError for caches that do
    not share their sequences.
    """
    if not isinstance(caches, Sequence) or not caches or not all(isinstance(cache, KVCache) for cache in caches):
        raise TypeError(f"row_of takes a sequence of at least one KVCache, such as [cache], not {type(caches).__name__}")
    sequences = caches[0].sequences
    if any(cache.sequences is not sequences for cache in caches):
        raise ValueError("rows are taken of caches that share their sequences (new_cache(like=...))")
    index = checks.whole("index", index, 0, sequences.batch - 1)
    row = _row(sequences, index, sequences.length_of(index) if length is None else checks.whole("length", length, 0, sequences.max_len))
    return [_cache(cache, index, row) for cache in caches]


def _row(whole: Sequences, index: int, length: int) -> Sequences:
    part = slice(index, index + 1)
    table = None if whole.block_table is None else whole.block_table[part]
    row = Sequences(
        whole.lengths[part], table, 1, whole.max_len, whole.module, bound=length, workspaces=whole.row_workspaces,
        call_order=whole.call_order, rollback=whole.rollback, whole=whole,
    )  # fmt: skip
    row.overflow, row.cropped = whole.overflow, whole.cropped
    row.least = None if whole.least is None else whole.least[part]
    return row


def _cache(cache: KVCache, index: int, row: Sequences) -> KVCache:
    part = slice(index, index + 1)
    packed = cache.packed if row.block_table is not None else cache.packed[part]
    return KVCache(packed, cache.k_residual[part], cache.v_residual[part], cache.layout_id, cache.block_tokens, row)
