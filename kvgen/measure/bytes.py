"""Bytes that one call must read, from which the read roofline follows."""

from __future__ import annotations

from collections.abc import Iterable

from kvgen.format.layout import PackedLayout
from kvgen.format.residual import residual_rows
from kvgen.spec import KernelSpec, Workload
from kvgen.spec.traffic import sequence_lengths


def must_read(spec: KernelSpec, layout: PackedLayout, lengths: Iterable[int]) -> int:
    """Bytes of codes, scales, zeros and unquantized tokens that `attend` reads for sequences of these lengths; padding does not count."""
    return sum(sequence_bytes(spec, layout, length) for length in lengths)


def sequence_bytes(spec: KernelSpec, layout: PackedLayout, length: int) -> int:
    """The share of one sequence, all KV heads; with a window, of the blocks that it reaches."""
    window, rows = spec.attention.window, residual_rows(spec, layout.tokens)
    first = 0 if window is None else max(0, length - window)
    full = rows.packed_blocks(length)
    blocks = full - min(full, first // layout.tokens)  # a window never goes with sink tokens
    element = 4 if spec.attention.dtype == "float32" else 2
    rest = min(length - full * layout.tokens, length - first)
    return spec.attention.kv_heads * (blocks * layout.payload_bytes + 2 * rest * layout.head_dim * element)


def timed_lengths(spec: KernelSpec, layout: PackedLayout, workload: Workload) -> list[int]:
    """Tokens of each sequence when a workload is timed: `half_full` of equal ones; of unequal ones those that the workload says."""
    if workload.shortest == workload.kv_len:
        return [half_full(spec, layout, workload.kv_len)] * workload.batch
    return sequence_lengths(workload)


def half_full(spec: KernelSpec, layout: PackedLayout, kv_len: int) -> int:
    """The length at which a workload is timed: `kv_len`, less so many tokens that the newest block is half full, as it is on average."""
    if kv_len % layout.tokens:
        return kv_len
    return max(1, kv_len - (kv_len - spec.cache.sink - spec.cache.local - layout.tokens // 2) % layout.tokens)
