# mypy: disable-error-code="untyped-decorator"
"""Each warp's own ring of sub-tiles in shared memory, filled by cp.async; no warp waits for another."""

from __future__ import annotations

from typing import Any

import tilelang.language as T


@T.macro
def copy_words(k: Any, memory: Any, place: Any, r: Any, offset: Any, count: Any, lane: Any) -> None:
    """`count` words (a multiple of four) from `offset` words behind the start of the KV tile's block into the ring."""
    for i in T.unroll(count // 128):
        T.ptx_cp_async(
            T.access_ptr(memory[place + (i * 32 + lane) * 4], "w", 4),
            T.access_ptr(k.packed[r.source[0] * 4 + offset + (i * 32 + lane) * 4], "r", 4),
            4,
        )
    if count % 128:  # by the first lanes, without a branch
        T.call_extern(
            "int32", f"kvgen::copy_async16_if<{count % 128 // 4}>",
            T.access_ptr(memory[place + (count // 128 * 32 + lane) * 4], "w", 4),
            T.access_ptr(k.packed[r.source[0] * 4 + offset + (count // 128 * 32 + lane) * 4], "r", 4),
            lane,
        )  # fmt: skip


@T.macro
def prefetch_page(p: Any, k: Any, at: Any, work: Any, r: Any, index: Any) -> None:
    """Page-table prefetch: load the page of the warp's KV tile `index` before it is needed."""
    if p.page_blocks:
        if at.warp + index * p.warps < work.count:
            r.page[0] = k.table[at.batch * k.table_stride + (work.first + at.warp + index * p.warps) // p.block_tiles // p.page_blocks]


@T.macro
def find_block(p: Any, k: Any, at: Any, r: Any, block: Any) -> None:
    """Offset of a block in 16 bytes; its page is in `page`."""
    if p.page_blocks:
        r.source[0] = (
            r.page[0] * k.packed_strides[0] + at.head * k.packed_strides[1] + T.cast(block % p.page_blocks, "int64") * (p.block_words // 4)
        )
    else:
        place = block % p.window_places if p.window_places else block
        r.source[0] = at.batch * k.packed_strides[0] + at.head * k.packed_strides[1] + T.cast(place, "int64") * (p.block_words // 4)


def value_params(p: Any, at: Any, index: Any) -> Any:
    """Where the ring has V's channel params of the warp's KV tile `index`."""
    return at.warp * p.ring_words + p.value_params_at + index % (p.tiles_in_flight + 1) * p.value_channel_words


@T.macro
def issue_copy(p: Any, k: Any, at: Any, work: Any, r: Any, memory: Any, index: Any, sub: Any, stage: Any) -> None:
    """Start the copy of sub-tile `sub` of the warp's KV tile `index`. A group is committed even if nothing is left, so that the number
    of groups in flight is known."""
    tile = at.warp + index * p.warps
    base = at.warp * p.ring_words
    if tile < work.count:
        start = (work.first + tile) % p.block_tiles * p.tile_subtiles
        if sub == 0:
            find_block(p, k, at, r, (work.first + tile) // p.block_tiles)
            prefetch_page(p, k, at, work, r, index + 1)
            if p.channel_words:
                group = start * p.layout.subtile // p.key.group
                slot = base + p.stages * p.subtile_words + index % p.tiles_in_flight * p.channel_words
                copy_words(k, memory, slot, r, group * p.channel_words, p.channel_words, at.lane)
            if p.value_channel_words:
                value_group = start * p.layout.subtile // p.value.group
                offset = p.layout.channel_params_offset("value") // 4 + value_group * p.value_channel_words
                copy_words(k, memory, value_params(p, at, index), r, offset, p.value_channel_words, at.lane)
        copy_words(k, memory, base + stage * p.subtile_words, r, p.header_words + (start + sub) * p.subtile_words, p.subtile_words, at.lane)
    T.ptx_commit_group()
