"""Memory for caches: how much there is of it, and which pages are whose."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvgen.errors import CacheMismatch
from kvgen.format.dtypes import torch_dtype
from kvgen.format.residual import residual_rows
from kvgen.format.window import cache_id, window_places
from kvgen.runtime import checks
from kvgen.runtime.huge_pages import memory_for, new_bytes
from kvgen.runtime.kvcache import KVCache
from kvgen.runtime.module import Module
from kvgen.runtime.sequences import Sequences

if TYPE_CHECKING:
    from kvgen.format.layout import PackedLayout
    from kvgen.spec import KernelSpec


@dataclass(frozen=True)
class CacheSize:
    """The requested sizes: sequences, most tokens of each, and pages of the pool for paged formats."""

    batch: int
    max_len: int
    pages: int | None

    @classmethod
    def of(cls, batch: object, max_len: object, pages: object | None) -> CacheSize:
        """Raises TypeError for other types than integers, ValueError below 1."""
        whole = checks.whole
        return cls(whole("batch", batch, 1), whole("max_len", max_len, 1), None if pages is None else whole("pages", pages, 1))


@torch.inference_mode(False)  # else nothing could be changed in place outside of that mode
def new_cache(
    spec: KernelSpec, layout: PackedLayout, module: Module, size: CacheSize, table: torch.Tensor | None, device: torch.device
) -> KVCache:
    """An empty cache without workspaces; `module` advances its lengths.

    Paged formats take a block table, int32 [batch, max_pages]; without one, sequence b owns pages b * max_pages and following.
    Raises ValueError on a table of the wrong shape, and on pages for a contiguous format.
    """
    page, pages = spec.cache.page, size.pages
    if page is None:
        if table is not None or pages is not None:
            raise ValueError("block_table and pages belong to paged caches, and this format is contiguous")
        rows, blocks = size.batch, _contiguous_blocks(spec, layout, size.max_len)
    else:
        table, rows = _page_table(size, -(-size.max_len // page), table, device)
        blocks = page // layout.tokens
    with memory_for(f"the lengths of {size.batch} sequences", 4 * size.batch, device):
        lengths = torch.zeros(size.batch, dtype=torch.int32, device=device)
        sequences = Sequences(lengths, table, size.batch, size.max_len, module, rollback=spec.cache.rollback)
    cache = _tensors(spec, layout, rows, blocks, sequences)
    if cache.gpu is not None:
        cache.call_order.follow(cache.gpu)  # other streams wait for the lengths and the workspace to be zero
    return cache


@torch.inference_mode(False)
def cache_like(spec: KernelSpec, layout: PackedLayout, other: KVCache) -> KVCache:
    """An empty cache whose sequences are those of `other`: another layer of the same model.

    Raises TypeError if `other` is no cache, ValueError if it has tokens, CacheMismatch if pages or blocks of the two layouts have different
    numbers of tokens, or if other numbers may be taken back.
    """
    if not isinstance(other, KVCache):
        raise TypeError(f"like must be a KVCache, not {type(other).__name__}")
    rows, _, blocks, _ = other.packed.shape
    if other.block_tokens != layout.tokens or (spec.cache.page is None) != (other.block_table is None):
        raise CacheMismatch("caches that share lengths must have blocks and pages of the same numbers of tokens")
    if other.sequences.rollback != spec.cache.rollback:
        raise CacheMismatch(
            f"caches that share lengths are cropped together: their specs must have one cache.rollback, not {other.sequences.rollback} and "
            f"{spec.cache.rollback}"
        )
    if other.block_table is not None and blocks * layout.tokens != spec.cache.page:
        raise CacheMismatch("caches that share a block table must have pages of the same number of tokens")
    if other.sequences.captured:
        raise ValueError("the cache in like has an Attention, or a captured step changes its lengths: make all layers before that")
    if other.sequences.longest:
        raise ValueError("the cache in like has tokens, which a new layer would lack: make all layers first, or call clear()")
    if other.block_table is None:
        blocks = _contiguous_blocks(spec, layout, other.max_len)
    return _tensors(spec, layout, rows, blocks, other.sequences)


def _contiguous_blocks(spec: KernelSpec, layout: PackedLayout, max_len: int) -> int:
    """Blocks of a sequence: for `max_len` tokens, with a sliding window only for what steps see."""
    blocks = max(1, -(-max_len // layout.tokens))
    return min(blocks, window_places(spec, layout.tokens) or blocks)


def _tensors(spec: KernelSpec, layout: PackedLayout, rows: int, blocks: int, sequences: Sequences) -> KVCache:
    """The tensors of `rows` sequences or pages of `blocks` blocks each."""
    device, heads, dtype = sequences.lengths.device, spec.attention.kv_heads, torch_dtype(spec.attention.dtype)
    shape = (rows, heads, blocks, layout.block_bytes)
    residual = (sequences.batch, heads, residual_rows(spec, layout.tokens).rows, layout.head_dim)
    need = math.prod(shape) + 2 * math.prod(residual) * dtype.itemsize
    with memory_for(f"a cache of {sequences.batch} x {sequences.max_len} tokens", need, device):
        return KVCache(
            packed=new_bytes(math.prod(shape), device).view(shape),
            k_residual=torch.empty(residual, dtype=dtype, device=device),
            v_residual=torch.empty(residual, dtype=dtype, device=device),
            layout_id=cache_id(spec, layout),
            block_tokens=layout.tokens,
            sequences=sequences,
        )


def _page_table(size: CacheSize, need: int, table: torch.Tensor | None, device: torch.device) -> tuple[torch.Tensor, int]:
    """A checked or fresh block table on the device, and the size of its pool."""
    batch, pages = size.batch, size.pages
    if table is None:
        with memory_for(f"a block table of {batch} x {need} pages", 4 * batch * need, device):
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
