"""Large caches full of known tokens, and fp64 attention over them for any lengths at the cost of a few blocks.

A *pattern* is a small number of packed blocks. A filled cache holds the pattern's blocks in a different order for every sequence, and a
different residual for every sequence. A token of the pattern that occurs n times has n times its weight, so attention over a million tokens
needs only as many scores as the pattern has tokens. A block that is skipped, read twice or taken from another sequence, head or page
changes the result.
"""

from __future__ import annotations

import math
import mmap
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvgen.format.layout import PackedLayout
from kvgen.format.residual import residual_rows
from kvgen.format.window import window_places
from kvgen.measure.device import free_bytes
from kvgen.runtime.kvcache import KVCache
from kvgen.runtime.variant import Variant
from kvgen.verify.data import learned_sinks, normal
from kvgen.verify.packing import pack_blocks, unpack_blocks

PATTERN_TOKENS = {"cpu": 4096, "cuda": 16384}
"""Tokens of a pattern. With fewer, an error in one token of a long sequence would be hidden; more take longer."""
LEAST_BLOCKS = 4
NORESERVE = 0x4000
"""Linux's MAP_NORESERVE, which `mmap` names from Python 3.13 on."""
SCORES = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Scores in fp64 that are held at once; on a CPU as many as glibc's heap reuses for the next step."""

Output = tuple[torch.Tensor, torch.Tensor]
"""`out` [batch, q_len, q_heads, head_dim] and LSE [batch, q_heads, q_len]."""


@dataclass(frozen=True)
class Pattern:
    """Packed blocks, uint8 [count, kv_heads, block_bytes]; K and V as they read back, fp64 [kv_heads, tokens, head_dim]."""

    packed: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def packed_by(cls, variant: Variant, device: torch.device) -> Pattern:
        """The pattern of a variant's layout: normal data."""
        layout, page = variant.layout, variant.spec.cache.page
        count = max(LEAST_BLOCKS, PATTERN_TOKENS[device.type] // layout.tokens)
        count = min(count, window_places(variant.spec, layout.tokens) or count)  # none takes the place of another
        tokens = count * layout.tokens + variant.spec.cache.unpacked
        inputs = normal(variant.spec, 1, tokens, seed=2)
        cache = variant.new_cache(1, tokens if page is None else max(tokens, page), device)
        variant.prefill(cache, inputs.k.to(device), inputs.v.to(device))
        packed = cache.packed.transpose(1, 2).flatten(0, 1)[:count].contiguous()
        k, v = (x.transpose(0, 1).flatten(1, 2) for x in unpack_blocks(layout, packed, variant.dtype))
        return cls(packed, k, v)

    @property
    def count(self) -> int:
        """Blocks."""
        return self.packed.shape[0]


_patterns: dict[object, Pattern] = {}
PATTERNS = 2
"""Layouts whose patterns are kept."""


def pattern_of(variant: Variant, device: torch.device) -> Pattern:
    """The pattern of a layout, packed by the first variant that asks for it."""
    key = (variant.spec.format_id, variant.layout.id, device)
    found = _patterns.pop(key, None) or Pattern.packed_by(variant, device)
    while len(_patterns) >= PATTERNS:
        del _patterns[next(iter(_patterns))]
    _patterns[key] = found
    return found


class FilledCache:
    """A cache of `batch` sequences with `room` known tokens each. The caller sets lengths and bound.

    `copies` of it can be had for inputs that rotate. `restore` undoes what `decode` left in residuals and lengths.
    """

    def __init__(self, variant: Variant, batch: int, room: int, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.spec, self.layout = variant.spec, variant.layout
        self.rows = residual_rows(variant.spec, variant.layout.tokens)
        self.pattern = self._pattern(variant)
        self.cache = self._allocated(variant, batch, room)
        self._order = self._fill()
        self._seen = self._count()
        random = torch.Generator(self.device).manual_seed(4)
        for residual in (self.cache.k_residual, self.cache.v_residual):
            residual.copy_(torch.randn(residual.shape, generator=random, device=self.device, dtype=residual.dtype))
        self._residuals = self.cache.k_residual.clone(), self.cache.v_residual.clone()
        self.known: dict[object, Output] = {}
        """References that were computed already, by their arguments."""

    def copy(self, variant: Variant) -> KVCache:
        """Another cache with the same contents in the same positions."""
        other = variant.new_cache(self.cache.batch, self.cache.max_len, self.device)
        for mine, theirs in zip(self.cache.tensors, other.tensors, strict=True):
            if mine is not None and theirs is not None:
                theirs.copy_(mine)
        other.bound, other.sequences.uniform = self.cache.bound, self.cache.sequences.uniform
        return other

    def set(self, lengths: Sequence[int], bound: int | None = None) -> None:
        """Set the lengths; the host's bound is the longest, unless `bound` is given."""
        self.cache.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        self.cache.bound = max(lengths) if bound is None else bound
        self.cache.sequences.uniform = len(set(lengths)) == 1

    def restore(self, cache: KVCache | None = None) -> None:
        """Restore the residuals as they were filled, in this cache or a copy of it."""
        cache = cache or self.cache
        cache.k_residual.copy_(self._residuals[0])
        cache.v_residual.copy_(self._residuals[1])

    def contents(self, b: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the first packed blocks of a sequence, fp64 [kv_heads, tokens, head_dim]."""
        tokens = torch.arange(self.layout.tokens, device=self.device)
        at = (self._order[b, :count].unsqueeze(1) * self.layout.tokens + tokens).flatten()
        return self.pattern.k[:, at], self.pattern.v[:, at]

    def attend(
        self,
        q: torch.Tensor,
        lengths: Sequence[int],
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
        sequences: Sequence[int] | None = None,
    ) -> Output:
        """Attention in fp64 of q [rows, q_len, q_heads, head_dim] over `lengths` tokens of `sequences` (all, in order, by default).

        `new` K and V [rows, q_len, kv_heads, head_dim] follow them, as in `decode`.
        """
        rows = q.shape[0]
        where = torch.arange(rows) if sequences is None else torch.tensor(sequences)
        where, tokens = where.to(self.device), torch.tensor(lengths).to(self.device)
        step = max(1, SCORES[self.device.type] // max(1, q.shape[1] * q.shape[2] * self.pattern.k.shape[1]))
        parts = [slice(start, start + step) for start in range(0, rows, step)]
        found = [self._attend(q[p], tokens[p], where[p], None if new is None else (new[0][p], new[1][p])) for p in parts]
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])

    # --- filling -----------------------------------------------------------------------------------------------------

    def _pattern(self, variant: Variant) -> Pattern:
        return pattern_of(variant, self.device)

    def _allocated(self, variant: Variant, batch: int, room: int) -> KVCache:
        return variant.new_cache(batch, room, self.device)

    def _fill(self) -> torch.Tensor:
        """Shuffle pages and write the pattern's blocks. Returns the index of the pattern's block at each position, [batch, blocks]."""
        packed, table, count = self.cache.packed, self.cache.block_table, self.pattern.count
        random = torch.Generator().manual_seed(3)
        if table is not None:
            pages = torch.randperm(packed.shape[0], generator=random)[: table.numel()].to(torch.int32)
            table.copy_(pages.reshape(table.shape))
        blocks = packed.shape[2] * (1 if table is None else table.shape[1])  # places of the blocks of a sequence
        turns = torch.rand(self.cache.batch, -(-blocks // count), count, generator=random)
        order = turns.argsort(-1).flatten(1)[:, :blocks].to(self.device)
        for b in range(self.cache.batch):
            mine = self.pattern.packed[order[b]]  # [blocks, kv_heads, block_bytes]
            if table is None:
                packed[b].copy_(mine.transpose(0, 1))
            else:
                packed[table[b].long()] = mine.reshape(table.shape[1], packed.shape[2], *mine.shape[1:]).transpose(1, 2)
        if places := window_places(self.spec, self.layout.tokens):  # a block is that which lies in its place
            order = order[:, torch.arange(max(blocks, -(-self.cache.max_len // self.layout.tokens)), device=self.device) % places]
        return order

    def _count(self) -> torch.Tensor:
        """How often each block of the pattern is among the first n blocks of a sequence, [batch, blocks + 1, pattern]."""
        batch, blocks = self._order.shape
        ones = torch.zeros(batch, blocks + 1, self.pattern.count, dtype=torch.int32, device=self.device)
        ones[:, 1:].scatter_(2, self._order.unsqueeze(2), 1)
        return ones.cumsum(1, dtype=torch.int32)

    # --- attention ---------------------------------------------------------------------------------------------------

    def _attend(self, q: torch.Tensor, lengths: torch.Tensor, where: torch.Tensor, new: tuple[torch.Tensor, torch.Tensor] | None) -> Output:
        attention, q_len, sink = self.spec.attention, q.shape[1], self.rows.sink
        packed = (lengths - sink - self.rows.local).clamp(min=0) // self.layout.tokens * self.layout.tokens
        total = lengths + (0 if new is None else q_len)
        end = (total.unsqueeze(1) - q_len + torch.arange(1, q_len + 1, device=self.device)).clamp(min=0)  # [rows, q_len]
        begin = torch.zeros_like(end) if attention.window is None else (end - attention.window).clamp(min=0)
        upto, after = (torch.minimum((x - sink).clamp(min=0), packed.unsqueeze(1)) for x in (end, begin))
        often = self._often(where, upto) - self._often(where, after)
        k, v, visible = self._plain(lengths, sink + packed, where, new, begin, end)
        queries = q.double().reshape(*q.shape[:2], attention.kv_heads, attention.group, -1).permute(2, 0, 3, 1, 4)
        queries = queries * attention.head_dim**-0.5  # [kv_heads, rows, group, q_len, dim]
        shape = (*queries.shape[:4], -1)
        far = self._softcap((queries.flatten(1, 3) @ self.pattern.k.transpose(1, 2)).reshape(shape))
        far = far.masked_fill_((often == 0)[:, None], -torch.inf)  # once for all rows: K of the pattern is read once
        near = self._softcap((queries.flatten(2, 3) @ k.permute(1, 0, 3, 2)).reshape(shape))
        near = near.masked_fill_(~visible[:, None], -torch.inf)
        top = torch.maximum(far.amax(-1), near.amax(-1)).unsqueeze(-1)
        sinks = learned_sinks(self.spec, self.device)
        if sinks is not None:
            logits = sinks.double().reshape(attention.kv_heads, 1, -1, 1, 1)
            top = torch.maximum(top, logits)
        top = top.masked_fill(top == -torch.inf, 0.0)
        far, near = far.sub_(top).exp_().mul_(often[:, None]), near.sub_(top).exp_()
        weight = far.sum(-1, keepdim=True) + near.sum(-1, keepdim=True)
        if sinks is not None:
            weight = weight + (logits - top).exp()
        seen = (far.flatten(1, 3) @ self.pattern.v).reshape(shape)
        seen += (near.flatten(2, 3) @ v.transpose(0, 1)).reshape(shape)
        out = seen / weight.masked_fill(weight == 0, 1.0)
        lse = (top + weight.log()).squeeze(-1)
        return out.permute(1, 3, 0, 2, 4).flatten(2, 3), lse.permute(1, 0, 2, 3).flatten(1, 2)

    def _often(self, where: torch.Tensor, upto: torch.Tensor) -> torch.Tensor:
        """How often each token of the pattern is among the first `upto` [rows, q_len] packed ones: fp64 [rows, q_len, tokens]."""
        tokens = self.layout.tokens
        block, rest = upto // tokens, upto % tokens
        whole = self._seen[where.unsqueeze(1), block].double()  # [rows, q_len, pattern]
        last = self._order[where.unsqueeze(1), block.clamp(max=self._order.shape[1] - 1)]
        partly = torch.arange(tokens, device=self.device) < rest.unsqueeze(-1)  # [rows, q_len, tokens of a block]
        often = whole.unsqueeze(-1).expand(*whole.shape, tokens).clone()
        often.scatter_add_(2, last[..., None, None].expand(*last.shape, 1, tokens), partly.double().unsqueeze(2))
        return often.flatten(2)

    def _plain(
        self,
        lengths: torch.Tensor,
        first: torch.Tensor,
        where: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        begin: torch.Tensor,
        end: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """K and V [rows, kv_heads, slots, dim] of unquantized and new tokens, and which queries see them, [rows, q_len, slots].

        `first` [rows] are the positions after the packed blocks.
        """
        k, v = (residual[where].double() for residual in self._residuals)
        sink, capacity = self.rows.sink, self.rows.capacity
        slot, start = torch.arange(self.rows.rows, device=self.device), first.unsqueeze(1)
        at = torch.where(slot < sink, slot, start + (slot - sink - (start - sink)) % capacity)  # the position in each row
        held = at < lengths.unsqueeze(1)
        if new is not None:
            k, v = (torch.cat([old, x.double().transpose(1, 2)], 2) for old, x in zip((k, v), new, strict=True))
            fresh = lengths.unsqueeze(1) + torch.arange(new[0].shape[1], device=self.device)
            at, held = torch.cat([at, fresh], 1), torch.cat([held, torch.ones_like(fresh, dtype=torch.bool)], 1)
        at, held = at.unsqueeze(1), held.unsqueeze(1)
        return k, v, held & (at < end.unsqueeze(2)) & (at >= begin.unsqueeze(2))

    def _softcap(self, scores: torch.Tensor) -> torch.Tensor:
        cap = self.spec.attention.softcap
        return cap * torch.tanh(scores / cap) if cap > 0 else scores


class SparseCache(FilledCache):
    """A filled cache whose blocks hold zeros, but for those at `marked` positions: in memory that is reserved, and otherwise untouched.

    A contiguous cache has more blocks between its sequences than they need, so that the last one begins beyond 4 GiB. A paged cache has
    more than 65,536 pages and more than 4 GiB, of which those of marked positions are the last. Both are smaller where the room is.
    """

    MARKS = 12
    """Different blocks, at most, at the marked positions."""
    PAGES = (1 << 16) + 256
    NBYTES = 9 << 29

    def __init__(self, variant: Variant, batch: int, room: int, device: torch.device | str, marked: Sequence[int]) -> None:
        self._marked = [*dict.fromkeys(marked)]
        super().__init__(variant, batch, room, device)

    def _pattern(self, variant: Variant) -> Pattern:
        whole, tokens = pattern_of(variant, self.device), variant.layout.tokens
        count = min(whole.count, self.MARKS)
        zero = block_of_zeros(variant.layout, variant.dtype, self.device).expand_as(whole.packed[:1])
        nothing = (x.transpose(0, 1).flatten(1, 2) for x in unpack_blocks(variant.layout, zero, variant.dtype))
        k, v = (torch.cat([x[:, : count * tokens], none], 1) for x, none in zip((whole.k, whole.v), nothing, strict=True))
        return Pattern(torch.cat([whole.packed[:count], zero]), k, v)

    def _allocated(self, variant: Variant, batch: int, room: int) -> KVCache:
        cache = variant.new_cache(batch, room, self.device)
        outer, heads, blocks, nbytes = cache.packed.shape
        one, most = heads * blocks * nbytes, most_reserved(self.device)
        if cache.block_table is None:
            apart = -(-self.NBYTES // max(1, batch - 1))
            blocks = max(blocks, min(-(-apart // (heads * nbytes)), most // (batch * heads * nbytes)))
        else:
            outer = max(outer, min(max(self.PAGES, -(-self.NBYTES // one)), most // one))
        cache.packed = reserved_blocks((outer, heads, blocks, nbytes), variant, self.device)
        return cache

    def _fill(self) -> torch.Tensor:
        packed, table, tokens, marks = self.cache.packed, self.cache.block_table, self.layout.tokens, self.pattern.count - 1
        blocks = -(-self.cache.max_len // tokens)
        places = window_places(self.spec, tokens) or blocks
        batch = range(self.cache.batch)
        if table is not None:
            self._assign_pages(table, packed.shape[0], packed.shape[2])
        lying = torch.full((len(batch), places), marks, device=self.device)
        for b in batch:
            for number, position in enumerate(self._marked):
                mark, place = (number + b) % marks, position % places
                lying[b, place] = mark
                outer, inner = (b, place) if table is None else (int(table[b, place // packed.shape[2]]), place % packed.shape[2])
                packed[outer, :, inner] = self.pattern.packed[mark]
        return lying[:, torch.arange(blocks, device=self.device) % places]

    def _assign_pages(self, table: torch.Tensor, pages: int, page_blocks: int) -> None:
        """The last pages to marked positions, the first ones to others."""
        marked = torch.zeros(table.shape[1], dtype=torch.bool)
        marked[[position // page_blocks for position in self._marked]] = True
        marked = marked.expand(table.shape)
        count = int(marked.sum())
        found = torch.empty(table.shape, dtype=torch.int32)
        found[~marked] = torch.arange(table.numel() - count, dtype=torch.int32)
        found[marked] = torch.arange(pages - 1, pages - 1 - count, -1, dtype=torch.int32)
        table.copy_(found)


MOST_ADDRESSES = 1 << 36
SHARE = 4
"""One part in so many of a GPU's free memory, or of a limited address space, is reserved at most."""


def most_reserved(device: torch.device) -> int:
    """Bytes that `reserved` may be asked for."""
    if device.type == "cuda":
        return free_bytes(device) // SHARE
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return min([MOST_ADDRESSES, *(limit // SHARE for limit in limits if limit != resource.RLIM_INFINITY)])


def reserved(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on the CPU pages of memory that are not written take no memory."""
    if device.type == "cuda":
        return torch.zeros(shape, dtype=dtype, device=device)
    room = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    return torch.frombuffer(room, dtype=dtype).view(tuple(shape))


def block_of_zeros(layout: PackedLayout, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A packed block of zeros, uint8 [block_bytes]. On the CPU it is zero bytes, whose codes may be others, of scale 0. A GPU's kernels may
    compute with another scale where that is 0, so that codes must be the right ones.
    """
    if device.type == "cpu":
        return torch.zeros(layout.block_bytes, dtype=torch.uint8)
    nothing = torch.zeros(layout.tokens, layout.head_dim, dtype=dtype, device=device)
    return pack_blocks(layout, nothing, nothing)


def reserved_blocks(shape: Sequence[int], variant: Variant, device: torch.device) -> torch.Tensor:
    """`reserved` packed blocks of zeros, uint8 [..., block_bytes]."""
    blocks, zero = reserved(shape, torch.uint8, device), block_of_zeros(variant.layout, variant.dtype, device)
    if bool(zero.any()):
        blocks[:] = zero
    return blocks


class Kept:
    """Filled caches that are kept for reuse, at most `room` bytes in all."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._caches: dict[object, FilledCache] = {}

    def get(self, variant: Variant, batch: int, tokens: int, device: torch.device) -> FilledCache:
        """A filled cache, reused if one is kept. The oldest are evicted first."""
        key = (variant.spec.format_id, variant.layout.id, device, batch, tokens)
        found = self._caches.pop(key, None)
        if found is None:
            while self._caches and sum(self._sizes()) > self.room:
                del self._caches[next(iter(self._caches))]
            found = FilledCache(variant, batch, tokens, device)
            variant.release(found.cache)
        self._caches[key] = found
        return found

    def _sizes(self) -> Iterator[int]:
        return (filled.cache.nbytes for filled in self._caches.values())
