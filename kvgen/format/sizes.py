"""What a format takes of memory, from its packed layout."""

from __future__ import annotations

from collections.abc import Iterable
from math import lcm

from kvgen.format.layout import PackedLayout, packed_layout
from kvgen.format.residual import residual_rows
from kvgen.spec import KernelSpec, Workload
from kvgen.spec.workloads import sequence_lengths

BLOCK = 128
"""Most tokens of a packed block where the format leaves them open."""


def block_multiple(spec: KernelSpec) -> int:
    """Every block is a multiple of this many tokens: whole groups of both operands, and whole sub-tiles, of 16 tokens where pages hold
    none of 32.
    """
    small = spec.cache.page is not None and spec.cache.page % 32 != 0
    return 16 if small and _whole_groups(spec, 16) == 16 else smallest_block(spec)


def smallest_block(spec: KernelSpec) -> int:
    """Tokens of the shortest packed block that holds whole sub-tiles of 32 tokens and whole groups of both operands."""
    return _whole_groups(spec, 32)


def usual_block(spec: KernelSpec) -> int:
    """Tokens of a block near 128 that holds whole groups and divides the pages."""
    return near_128(block_multiple(spec), spec.cache.page or 0)


def near_128(block: int, page: int = 0) -> int:
    """`block` tokens, doubled while 128 are not exceeded and a page of `page` tokens (0: any) holds whole blocks."""
    while block * 2 <= BLOCK and page % (block * 2) == 0:
        block *= 2
    return block


def _whole_groups(spec: KernelSpec, subtile: int) -> int:
    """Tokens of the shortest block of whole sub-tiles and whole groups."""
    return lcm(subtile, *(quant.group for quant in (spec.key, spec.value) if quant.per_channel))


def layout_of_format(spec: KernelSpec) -> PackedLayout:
    """The layout of a format in blocks of the usual size. Raises ValueError where no layout holds the spec."""
    return packed_layout(spec, usual_block(spec), "simd")


def bits_per_element(spec: KernelSpec) -> float:
    """Bits per element of K and V in packed blocks, with all scales, zeros and indices, without padding and unquantized tokens."""
    layout = layout_of_format(spec)
    return layout.payload_bytes * 8 / (2 * layout.tokens * layout.head_dim)


def bits_at(spec: KernelSpec, length: int) -> float:
    """Bits per element of a sequence of `length` tokens with its unquantized ones: sink, local, and those of a block that is not full."""
    layout = layout_of_format(spec)
    elements = 2 * layout.head_dim
    rows = residual_rows(spec, layout.tokens)
    full = rows.packed_blocks(length)
    wide = 32 if spec.attention.dtype == "float32" else 16
    rest = 0 if rows.arrival else (length - full * layout.tokens) * elements * wide
    return (full * layout.payload_bytes * 8 + rest) / (length * elements)


def token_bytes(spec: KernelSpec, layers: int) -> float:
    """Bytes of a packed token in all layers and KV heads of a model, padding of blocks included, unquantized tokens not."""
    layout = layout_of_format(spec)
    return layers * spec.attention.kv_heads * layout.block_bytes / layout.tokens


def must_read(spec: KernelSpec, layout: PackedLayout, lengths: Iterable[int]) -> int:
    """Bytes of codes, scales, zeros and unquantized tokens that one `attend` over sequences of these lengths reads; padding does not count.
    With a window, only the blocks that it reaches.
    """
    window, rows = spec.attention.window, residual_rows(spec, layout.tokens)
    total = 0
    for length in lengths:
        first = 0 if window is None else max(0, length - window)
        if rows.arrival:
            total += (length - first) * layout.payload_bytes // layout.tokens
            continue
        full = rows.packed_blocks(length)
        blocks = full - min(full, first // layout.tokens)  # a window never goes with sink tokens
        rest = min(length - full * layout.tokens, length - first)
        total += blocks * layout.payload_bytes + 2 * rest * layout.head_dim * (4 if spec.attention.dtype == "float32" else 2)
    return spec.attention.kv_heads * total


def timed_lengths(spec: KernelSpec, layout: PackedLayout, workload: Workload) -> list[int]:
    """Tokens of each sequence when a workload is timed: `half_full` of equal ones; of unequal ones those that the workload says."""
    if workload.shortest == workload.kv_len:
        return [half_full(spec, layout, workload.kv_len)] * workload.batch
    return sequence_lengths(workload)


def half_full(spec: KernelSpec, layout: PackedLayout, kv_len: int) -> int:
    """The length at which a workload is timed: `kv_len`, less so many tokens that the newest block is half full, as it is on average."""
    if kv_len % layout.tokens or spec.cache.arrival:
        return kv_len
    return max(1, kv_len - (kv_len - spec.cache.sink - spec.cache.local - layout.tokens // 2) % layout.tokens)
