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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from kvgen._machine import available_bytes
from kvgen.format.residual import residual_rows, window_places
from kvgen.format.rotation import rotate, rotate_back
from kvgen.format.scales import trial_scales
from kvgen.runtime.calls import Variant
from kvgen.runtime.kvcache import KVCache
from kvgen.verify.data import learned_sinks, normal
from kvgen.verify.packing import dequantize, pack_blocks, quantize, token_bits, unpack_blocks
from kvgen.verify.reference import rotated_query

T = TypeVar("T")
Pair = tuple[torch.Tensor, torch.Tensor]
"""`out` [batch, q_len, q_heads, head_dim] and LSE [batch, q_heads, q_len]; or K and V."""
PATTERN_TOKENS = {"cpu": 4096, "cuda": 16384}
"""Tokens of a pattern. With fewer, an error in one token of a long sequence would be hidden; more take longer."""
LEAST_BLOCKS = 4
MOST_NEW = 16
"""Tokens that a check appends, at most, before it restores what was filled."""
SCORES = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Scores in fp64 that are held at once; on a CPU as many as glibc's heap reuses for the next step."""
NORESERVE = 0x4000
"""Linux's MAP_NORESERVE, which `mmap` names from Python 3.13 on."""
MOST_ADDRESSES = 1 << 36
SHARE = 4
"""One part in so many of a GPU's free memory, or of a limited address space, is reserved at most."""

_patterns: dict[object, Pattern] = {}


class FilledCache:
    """A cache of `batch` sequences with `room` known tokens each. The caller sets lengths and bound.

    `copy` gives another one for inputs that rotate. `restore` undoes what `decode` left in the residuals, or behind the lengths.
    """

    def __init__(self, variant: Variant, batch: int, room: int, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.spec, self.layout = variant.spec, variant.layout
        self.rows = residual_rows(variant.spec, variant.layout.tokens)
        self.places = window_places(variant.spec, variant.layout.tokens)
        self.pattern = self._pattern(variant)
        self.cache = self._allocated(variant, batch, room)
        self._order = self._fill()
        """The index of the pattern's block at each position, [batch, blocks]."""
        ones = torch.zeros(batch, self._order.shape[1] + 1, len(self.pattern.packed), dtype=torch.int32, device=self.device)
        ones[:, 1:].scatter_(2, self._order.unsqueeze(2), 1)
        self._seen = ones.cumsum(1, dtype=torch.int32)
        """How often each block of the pattern is among the first n blocks of a sequence, [batch, blocks + 1, pattern]."""
        random = torch.Generator(self.device).manual_seed(4)
        for residual in (self.cache.k_residual, self.cache.v_residual):
            residual.copy_(torch.randn(residual.shape, generator=random, device=self.device, dtype=residual.dtype))
        self._residuals = self.cache.k_residual.clone(), self.cache.v_residual.clone()
        self.known: dict[object, Pair] = {}
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
        self._lengths = list(lengths)
        self.cache.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        self.cache.bound = max(lengths) if bound is None else bound
        self.cache.sequences.uniform = len(set(lengths)) == 1

    def restore(self, cache: KVCache | None = None) -> None:
        """Restore as they were filled, in this cache or a copy of it, the residuals, or the blocks behind the lengths that were set."""
        cache = cache or self.cache
        if self.rows.arrival:
            for b, length in enumerate(self._lengths):
                for block in range(length // self.layout.tokens, min(-(-(length + MOST_NEW) // self.layout.tokens), self._order.shape[1])):
                    outer, _, inner = self.place(block)
                    whose = b if isinstance(outer, slice) else outer[b]
                    cache.packed[whose, :, inner] = self.pattern.packed[self._order[b, block]]
            return
        cache.k_residual.copy_(self._residuals[0])
        cache.v_residual.copy_(self._residuals[1])

    def contents(self, b: int, count: int) -> Pair:
        """K and V of the first packed blocks of a sequence, fp64 [kv_heads, tokens, head_dim]."""
        tokens = torch.arange(self.layout.tokens, device=self.device)
        at = (self._order[b, :count].unsqueeze(1) * self.layout.tokens + tokens).flatten()
        k, v = self.pattern.k[:, at], self.pattern.v[:, at]
        return rotate_back(k, self.layout.key.rotation), rotate_back(v, self.layout.value.rotation)

    def place(self, block: int) -> tuple[Any, ...]:
        """The index of `cache.packed` under which a block of every sequence lies: [batch, kv_heads, block_bytes]."""
        if self.cache.block_table is not None:
            page, inner = divmod(block, self.cache.packed.shape[2])
            return self.cache.block_table[:, page].long(), slice(None), inner
        return slice(None), slice(None), block % self.places if self.places else block

    def next_block(self, sequences: slice, length: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The block that new tokens k, v [batch, tokens, kv_heads, head_dim] complete in sequences of a length, packed by the reference:
        uint8 [sequences, kv_heads, block_bytes].
        """
        first, tokens = self.rows.first(length), self.layout.tokens
        scales = self.cache.scales
        if self.rows.arrival:
            at, inside = self.rows.filling(length), length % tokens
            old = self.pattern.packed[self._order[sequences, at]]
            many = min(k.shape[1], tokens - inside)
            fresh = [x.new_zeros(len(old), x.shape[2], tokens, x.shape[3]) for x in (k, v)]
            for given, whole, op in zip((k, v), fresh, self.layout.operands, strict=True):
                whole[:, :, inside : inside + many] = rotate(given[sequences, :many], op.rotation).transpose(1, 2)
            number = torch.arange(tokens, device=self.device)
            mine = token_bits(self.layout, (number >= inside) & (number < inside + many))
            packed = pack_blocks(self.layout, fresh[0], fresh[1], None if scales is None else scales[:, :, None])
            return (old & ~mine) | (packed & mine)
        held = [self.rows.row(position) for position in range(first, min(first + tokens, length))]
        blocks = (
            torch.cat([residual[sequences][:, :, held], rotate(new[sequences, : tokens - len(held)], op.rotation).transpose(1, 2)], 2)
            for residual, new, op in ((self.cache.k_residual, k, self.layout.key), (self.cache.v_residual, v, self.layout.value))
        )
        k_blocks, v_blocks = blocks
        return pack_blocks(self.layout, k_blocks, v_blocks, None if scales is None else scales[:, :, None])

    def attend(self, q: torch.Tensor, lengths: Sequence[int], new: Pair | None = None, sequences: Sequence[int] | None = None) -> Pair:
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

    def _pattern(self, variant: Variant) -> Pattern:
        return pattern_of(variant, self.device)

    def _allocated(self, variant: Variant, batch: int, room: int) -> KVCache:
        return variant.new_cache(batch, room, self.device)

    def _fill(self) -> torch.Tensor:
        """Shuffle pages and write the pattern's blocks. Returns their order."""
        packed, table, count = self.cache.packed, self.cache.block_table, len(self.pattern.packed)
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
        if self.places:  # a block is that which lies in its place
            order = order[:, torch.arange(max(blocks, -(-self.cache.max_len // self.layout.tokens)), device=self.device) % self.places]
        return order

    def _attend(self, q: torch.Tensor, lengths: torch.Tensor, where: torch.Tensor, new: Pair | None) -> Pair:
        """Over the pattern's tokens, by how often each is seen, and over those that are not packed."""
        attention, q_len, sink, cap = self.spec.attention, q.shape[1], self.rows.sink, self.spec.attention.softcap
        packed = (lengths - sink - self.rows.local).clamp(min=0) // self.layout.tokens * self.layout.tokens
        if self.rows.arrival:
            packed = lengths
        total = lengths + (0 if new is None else q_len)
        end = (total.unsqueeze(1) - q_len + torch.arange(1, q_len + 1, device=self.device)).clamp(min=0)  # [rows, q_len]
        begin = torch.zeros_like(end) if attention.window is None else (end - attention.window).clamp(min=0)
        upto, after = (torch.minimum((x - sink).clamp(min=0), packed.unsqueeze(1)) for x in (end, begin))
        k, v, at, held = self._unpacked(lengths, sink + packed, where, new)
        visible = held & (at < end.unsqueeze(2)) & (at >= begin.unsqueeze(2))
        times = torch.cat([self._often(where, upto) - self._often(where, after), visible.double()], 2)
        queries = (
            rotated_query(q, self.layout.key.rotation, early=q.is_cuda and q_len <= attention.q_len)
            .reshape(*q.shape[:2], attention.kv_heads, attention.group, -1)
            .permute(2, 0, 3, 1, 4)
        )
        queries = queries * attention.head_dim**-0.5  # [kv_heads, rows, group, q_len, dim]
        shape, count = (*queries.shape[:4], -1), self.pattern.k.shape[1]
        products = (queries.flatten(1, 3) @ self.pattern.k.transpose(1, 2), queries.flatten(2, 3) @ k.permute(1, 0, 3, 2))
        scores = torch.cat([one.reshape(shape) for one in products], -1)
        if cap > 0:
            scores = cap * torch.tanh(scores / cap)
        scores += times.log()[:, None]
        lse = torch.logsumexp(scores, -1)
        sinks = learned_sinks(self.spec, self.device)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.double().reshape(attention.kv_heads, 1, -1, 1))
        weight = scores.sub_(lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp_()
        out = (weight[..., :count].flatten(1, 3) @ self.pattern.v).reshape(shape)
        out += (weight[..., count:].flatten(2, 3) @ v.transpose(0, 1)).reshape(shape)
        out = rotate_back(out.permute(1, 3, 0, 2, 4).flatten(2, 3), self.layout.value.rotation)
        return out, lse.permute(1, 0, 2, 3).flatten(1, 2)

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

    def _unpacked(
        self, lengths: torch.Tensor, first: torch.Tensor, where: torch.Tensor, new: Pair | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """K and V [rows, kv_heads, slots, dim] of unquantized and new tokens; their positions, and which slots hold one, [rows, 1, slots].

        `first` [rows] are the positions after the packed blocks.
        """
        k, v = (residual[where].double() for residual in self._residuals)
        sink, capacity = self.rows.sink, max(1, self.rows.capacity)
        slot, start = torch.arange(self.rows.rows, device=self.device), first.unsqueeze(1)
        at = torch.where(slot < sink, slot, start + (slot - sink - (start - sink)) % capacity)  # the position in each row
        held = at < lengths.unsqueeze(1)
        if new is not None:
            rotated = (rotate(x, op.rotation) for x, op in zip(new, self.layout.operands, strict=True))
            if self.rows.arrival:
                scales = (None, None) if self.cache.scales is None else self.cache.scales
                each = zip(rotated, (self.spec.key, self.spec.value), scales, strict=True)
                rotated = (dequantize(quantize(x, quant, None, scale), quant) if quant.quantized else x for x, quant, scale in each)
            k, v = (torch.cat([old, x.double().transpose(1, 2)], 2) for old, x in zip((k, v), rotated, strict=True))
            fresh = lengths.unsqueeze(1) + torch.arange(new[0].shape[1], device=self.device)
            at, held = torch.cat([at, fresh], 1), torch.cat([held, torch.ones_like(fresh, dtype=torch.bool)], 1)
        return k, v, at.unsqueeze(1), held.unsqueeze(1)


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
        count = min(len(whole.packed), self.MARKS)
        zero, scales = block_of_zeros(variant, self.device).expand_as(whole.packed[:1]), of_heads(variant, self.device)
        nothing = (x.transpose(0, 1).flatten(1, 2) for x in unpack_blocks(variant.layout, zero, variant.dtype, scales))
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
        packed, table, marks = self.cache.packed, self.cache.block_table, len(self.pattern.packed) - 1
        blocks = -(-self.cache.max_len // self.layout.tokens)
        places = self.places or blocks
        if table is not None:  # the last pages to marked positions, the first ones to others
            marked = torch.zeros(table.shape, dtype=torch.bool)
            marked[:, [position // packed.shape[2] for position in self._marked]] = True
            count, found = int(marked.sum()), torch.empty(table.shape, dtype=torch.int32)
            found[~marked] = torch.arange(table.numel() - count, dtype=torch.int32)
            found[marked] = torch.arange(len(packed) - 1, len(packed) - 1 - count, -1, dtype=torch.int32)
            table.copy_(found)
        lying = torch.full((self.cache.batch, places), marks, device=self.device)
        for number, position in enumerate(self._marked):
            which = (number + torch.arange(self.cache.batch, device=self.device)) % marks
            lying[:, position % places] = which
            packed[self.place(position)] = self.pattern.packed[which]
        return lying[:, torch.arange(blocks, device=self.device) % places]


@dataclass(frozen=True)
class Pattern:
    """Packed blocks, uint8 [count, kv_heads, block_bytes]; K and V as they hold them, fp64 [kv_heads, tokens, head_dim]."""

    packed: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def pattern_of(variant: Variant, device: torch.device) -> Pattern:
    """The pattern of a layout: normal data, packed by the first variant that asks for it."""
    layout, page = variant.layout, variant.spec.cache.page

    def packed() -> Pattern:
        count = max(LEAST_BLOCKS, PATTERN_TOKENS[device.type] // layout.tokens)
        count = min(count, window_places(variant.spec, layout.tokens) or count)  # none takes the place of another
        tokens = count * layout.tokens + variant.spec.cache.unpacked
        inputs = normal(variant.spec, 1, tokens, seed=2)
        cache = variant.new_cache(1, tokens if page is None else max(tokens, page), device)
        variant.prefill(cache, inputs.k.to(device), inputs.v.to(device))
        blocks = cache.packed.transpose(1, 2).flatten(0, 1)[:count].contiguous()
        return Pattern(
            blocks, *(x.transpose(0, 1).flatten(1, 2) for x in unpack_blocks(layout, blocks, variant.dtype, of_heads(variant, device)))
        )

    return kept(_patterns, (variant.spec.format_id, layout.id, device), 2, packed)


def of_heads(variant: Variant, device: torch.device) -> torch.Tensor | None:
    """Static scales of a variant's caches for K and V [..., kv_heads, tokens, head_dim]."""
    scales = trial_scales(variant.spec, device)
    return None if scales is None else scales[:, :, None]


def kept(store: dict[object, T], key: object, most: int, make: Callable[[], T]) -> T:
    """The value of a key, made once; of `most` values that are kept, the one that was not used for the longest goes."""
    found = store.pop(key, None)
    if found is None:
        while len(store) >= most:
            del store[next(iter(store))]
        found = make()
    store[key] = found
    return found


def free_bytes(device: torch.device) -> int:
    """Free memory in bytes; on a GPU also what torch has cached, and gives back to the driver when an allocation fails."""
    if device.type != "cuda":
        return available_bytes()
    return int(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def most_reserved(device: torch.device) -> int:
    """Bytes that `reserved` may be asked for."""
    if device.type == "cuda":
        return free_bytes(device) // SHARE
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return min([MOST_ADDRESSES, *(limit // SHARE for limit in limits if limit != resource.RLIM_INFINITY)])


def reserved(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on the CPU pages of memory that are not written take no memory."""
    if device.type == "cuda" or 0 in shape:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    room = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    return torch.frombuffer(room, dtype=dtype).view(tuple(shape))


def reserved_blocks(shape: Sequence[int], variant: Variant, device: torch.device, *, exact: bool = False) -> torch.Tensor:
    """`reserved` packed blocks, each `block_of_zeros`: uint8 [..., block_bytes]."""
    blocks, zero = reserved(shape, torch.uint8, device), block_of_zeros(variant, device, exact=exact)
    if bool(zero.any()):
        blocks[:] = zero
    return blocks


def block_of_zeros(variant: Variant, device: torch.device, *, exact: bool = False) -> torch.Tensor:
    """A packed block of zeros, uint8 [block_bytes]. On the CPU it is zero bytes, whose codes may be others, of scale 0: with static scales
    other numbers, unless it must be `exact`. A GPU's kernels may compute with another scale where that is 0, so codes must be the right
    ones.
    """
    if device.type == "cpu" and not (exact and any(op.static for op in variant.layout.operands)):
        return torch.zeros(variant.layout.block_bytes, dtype=torch.uint8)
    nothing = torch.zeros(variant.layout.tokens, variant.layout.head_dim, dtype=variant.dtype, device=device)
    return pack_blocks(variant.layout, nothing, nothing, torch.ones(2, 1, device=device))
