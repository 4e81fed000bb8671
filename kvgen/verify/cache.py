"""A whole KV cache as the numerics section defines it: the oracle of append, flush, crop and attend for every back end."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from kvgen.format.layout import PackedLayout
from kvgen.format.residual import residual_rows
from kvgen.spec import KernelSpec
from kvgen.verify.attention import attend
from kvgen.verify.data import learned_sinks
from kvgen.verify.packing import OPERANDS, from_blocks, pack_blocks, to_blocks, unpack_blocks, write_operand
from kvgen.verify.quantize import dequantize, quantize, torch_dtype

Pair = tuple[torch.Tensor, torch.Tensor]


class ReferenceCache:
    """K and V of `batch` sequences, in any format of the spec language.

    Positions below `sink` stay in `dtype`. Of the others, block i contains positions sink + [i * block, (i + 1) * block). `flush` quantizes
    every full block whose tokens are all older than the `local` newest; `crop` takes tokens back, up to `rollback`. Unquantized tokens
    read back as appended.
    """

    def __init__(self, spec: KernelSpec, batch: int, block: int) -> None:
        """`block` is the residual block size N_r in tokens. Raises ValueError if a group does not divide it."""
        for name, quant in (("key", spec.key), ("value", spec.value)):
            if quant.per_channel and block % quant.group:
                raise ValueError(f"the residual block ({block}) must be a multiple of {name}.group ({quant.group})")
        self.spec = spec
        self.block = block
        self.lengths = torch.zeros(batch, dtype=torch.int32)
        """Tokens per sequence, int32 [batch]."""
        self.blocks = torch.zeros(batch, dtype=torch.int32)
        """Quantized blocks per sequence, int32 [batch]."""
        self.rows = residual_rows(spec, block)
        """Which tokens are unquantized, and in which rows they lie."""
        self._least = torch.zeros(batch, dtype=torch.int32)
        """Length below which a sequence can no longer be cropped, int32 [batch]."""
        shape = (batch, 0, spec.attention.kv_heads, spec.attention.head_dim)
        self._given = [torch.zeros(shape, dtype=torch_dtype(spec.attention.dtype)) for _ in range(2)]
        self._read = [torch.zeros(shape, dtype=torch.float64) for _ in range(2)]

    def append(self, k: torch.Tensor, v: torch.Tensor, new_lengths: torch.Tensor | None = None) -> None:
        """Add the first new_lengths[b] (all, where None) of k[b], v[b] [batch, tokens, kv_heads, head_dim], unquantized."""
        counts = torch.full_like(self.lengths, k.shape[1]) if new_lengths is None else new_lengths.to(torch.int32)
        if int(counts.max()) > k.shape[1] or int(counts.min()) < 0:
            raise ValueError(f"new_lengths must be between 0 and {k.shape[1]}")
        self._reserve(int((self.lengths + counts).max()))
        for which, x in enumerate((k, v)):
            if x.dtype != self._given[which].dtype:
                raise ValueError(f"the cache holds {self._given[which].dtype}, got {x.dtype}")
            for b, (start, count) in enumerate(zip(self.lengths.tolist(), counts.tolist(), strict=True)):
                self._given[which][b, start : start + count] = x[b, :count]
                self._read[which][b, start : start + count] = x[b, :count].double()
        self.lengths += counts

    def flush(self) -> None:
        """Quantize every block that is due."""
        sink, due = self.rows.sink, [self.rows.packed_blocks(length) for length in self.lengths.tolist()]
        for given, read, quant in zip(self._given, self._read, (self.spec.key, self.spec.value), strict=True):
            for b, (first, last) in enumerate(zip(self.blocks.tolist(), due, strict=True)):
                if last > first and quant.bits != 16:
                    there = slice(sink + first * self.block, sink + last * self.block)
                    blocks = to_blocks(given[b : b + 1, there], self.block)
                    read[b : b + 1, there] = from_blocks(dequantize(quantize(blocks, quant, getattr(quant, "boost", None)), quant))
        self.blocks = torch.tensor(due, dtype=torch.int32)

    def crop(self, tokens: torch.Tensor | int) -> None:
        """Take back the newest tokens[b] tokens of each sequence, or the same number of each that has any.

        Raises ValueError below a length that is `cache.rollback` under the longest that the sequence had.
        """
        counts = torch.where(self.lengths > 0, tokens, 0).to(torch.int32)
        self._least = torch.maximum(self._least, self.lengths - self.rows.rollback)
        lengths = self.lengths - counts
        if bool((counts < 0).any() | (lengths < self._least).any()):
            raise ValueError(f"at most {self.rows.rollback} tokens can be taken back, as many as a sequence has")
        self.lengths = lengths
        for b, length in enumerate(lengths.tolist()):
            self.blocks[b] = min(int(self.blocks[b]), self.rows.packed_blocks(length))
            for given, read in zip(self._given, self._read, strict=True):
                read[b, self.rows.first(length) : length] = given[b, self.rows.first(length) : length].double()

    def prefill(self, k: torch.Tensor, v: torch.Tensor, new_lengths: torch.Tensor | None = None) -> None:
        """`append`, then `flush`, like `pack` of a module."""
        self.append(k, v, new_lengths)
        self.flush()

    def attend(
        self, q: torch.Tensor, *, scale: float | None = None, sinks: torch.Tensor | None = None, rounded: torch.dtype | None = None
    ) -> Pair:
        """Output [batch, q_len, q_heads, head_dim] and LSE [batch, q_heads, q_len] (fp64) of the newest q_len positions.

        `sinks` [q_heads] is given exactly when the spec has them; ValueError otherwise. `rounded`: the type to which dequantized K and V
        are rounded first, as extend attention on a GPU does.
        """
        if (sinks is not None) != self.spec.attention.sinks:
            raise ValueError("`sinks` must be given exactly when attention.sinks is true")
        att = self.spec.attention
        k, v = self._read if rounded is None else (x.to(rounded).double() for x in self._read)
        return attend(q, k, v, self.lengths, scale=scale, softcap=att.softcap, window=att.window, sinks=sinks)

    def decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None, sinks: torch.Tensor | None = None
    ) -> Pair:
        """`append`, `attend`, then `flush`: the new tokens, and the residual before them, are attended unquantized."""
        self.append(k, v)
        result = self.attend(q, scale=scale, sinks=sinks)
        self.flush()
        return result

    def keys_values(self) -> Pair:
        """K and V as attention reads them: fp64 [batch, longest length, kv_heads, head_dim], 0 past a sequence's length."""
        k, v = self._read
        longest = int(self.lengths.max())
        return k[:, :longest].clone(), v[:, :longest].clone()

    def packed(self, layout: PackedLayout, blocks: int | None = None) -> torch.Tensor:
        """The contiguous cache: uint8 [batch, kv_heads, blocks, block_bytes], 0 where nothing is packed."""
        if layout.tokens != self.block:
            raise ValueError(f"the layout has blocks of {layout.tokens} tokens, the cache of {self.block}")
        heads, sink = self.spec.attention.kv_heads, self.rows.sink
        count = int(self.blocks.max()) if blocks is None else blocks
        out = torch.zeros(len(self.lengths), heads, count, layout.block_bytes, dtype=torch.uint8)
        for which, x in zip(OPERANDS, self._given, strict=True):
            for b, n in enumerate(self.blocks.tolist()):
                if n:
                    write_operand(layout, which, out[b, :, :n], to_blocks(x[b : b + 1, sink : sink + n * self.block], self.block)[0])
        return out

    def paged(self, layout: PackedLayout, block_table: torch.Tensor, pages: int, fill: int = 0) -> torch.Tensor:
        """The paged cache: uint8 [pages, kv_heads, page / N_r, block_bytes], `fill` where no sequence has a block.

        `block_table` int [batch, max_pages] names the page of every page / N_r blocks of a sequence.
        """
        page = self.spec.cache.page
        if page is None or page % self.block:
            raise ValueError(f"the spec's page ({page}) must be a multiple of the residual block ({self.block})")
        per_page = page // self.block
        blocks = self.packed(layout)
        out = torch.full((pages, blocks.shape[1], per_page, layout.block_bytes), fill, dtype=torch.uint8)
        for b, n in enumerate(self.blocks.tolist()):
            for index in range(n):
                out[int(block_table[b, index // per_page]), :, index % per_page] = blocks[b, :, index]
        return out

    def residual(self) -> Pair:
        """K and V of the unquantized tokens, in dtype [batch, kv_heads, rows, head_dim], in the rows that `residual_rows` says.

        Also of tokens that are unquantized again after the largest `crop` that is allowed now. 0 in the other rows, which a module may use.
        """
        att = self.spec.attention
        shape = (len(self.lengths), att.kv_heads, self.rows.rows, att.head_dim)
        held = tuple(torch.zeros(shape, dtype=x.dtype) for x in self._given)
        for b, (length, least) in enumerate(zip(self.lengths.tolist(), self._least.tolist(), strict=True)):
            first = self.rows.first(max(least, length - self.rows.rollback))
            positions = [*range(min(length, self.rows.sink)), *range(first, length)]
            for out, given in zip(held, self._given, strict=True):
                out[b][:, [self.rows.row(position) for position in positions]] = given[b, positions].transpose(0, 1)
        return held[0], held[1]

    def _reserve(self, length: int) -> None:
        """Room for `length` tokens per sequence; doubles, so that appending token by token stays cheap."""
        held = self._given[0].shape[1]
        more = max(length, 2 * held) - held if length > held else 0
        for buffers in (self._given, self._read):
            buffers[:] = [torch.cat([old, old.new_zeros(old.shape[0], more, *old.shape[2:])], dim=1) if more else old for old in buffers]


class Life:
    """K and V of whole sequences, [batch, `whole_tokens`, kv_heads, head_dim], all blocks of which are packed at once: what a cache holds
    follows from its lengths. Of small caches that grow, on any device.
    """

    def __init__(self, spec: KernelSpec, layout: PackedLayout, k: torch.Tensor, v: torch.Tensor) -> None:
        self.spec, self.raw, sink = spec, [k, v], spec.cache.sink
        self.rows = residual_rows(spec, layout.tokens)
        self.blocks = pack_blocks(layout, *(to_blocks(x[:, sink:], layout.tokens) for x in (k, v)))
        """Packed by the reference: uint8 [batch, kv_heads, blocks, block_bytes]."""
        read = (from_blocks(x) for x in unpack_blocks(layout, self.blocks, k.dtype))
        self.read = [torch.cat([given[:, :sink].double(), x], 1) for given, x in zip((k, v), read, strict=True)]
        """As they read back when packed, fp64."""

    @staticmethod
    def whole_tokens(spec: KernelSpec, layout: PackedLayout, tokens: int) -> int:
        """The least number of tokens, at least `tokens`, of which those after the sink are whole blocks."""
        sink = spec.cache.sink
        return sink + -(-max(0, tokens - sink) // layout.tokens) * layout.tokens

    def drafted(self, kept: tuple[int, ...]) -> Life:
        """The life with other tokens from `kept[b]` on, which will be taken back. No block may hold them yet."""
        token = torch.arange(self.raw[0].shape[1], device=self.raw[0].device)
        draft = (token >= torch.tensor(kept, device=token.device).unsqueeze(1))[..., None, None]
        other = copy.copy(self)
        other.raw = [torch.where(draft, -x, x) for x in self.raw]
        return other

    def new(self, starts: Sequence[int], count: int) -> Pair:
        """`count` tokens of every sequence from its own start, K and V [batch, count, kv_heads, head_dim]; zeros past the data."""
        padded = (torch.cat([x, x.new_zeros((x.shape[0], count, *x.shape[2:]))], 1) for x in self.raw)
        k, v = (torch.stack([x[b, start : start + count] for b, start in enumerate(starts)]) for x in padded)
        return k, v

    def seen(self, lengths: Sequence[int]) -> Pair:
        """K and V in fp64 as attention sees them: packed blocks as they read back, the rest as given."""
        device = self.raw[0].device
        token = torch.arange(self.raw[0].shape[1], device=device)
        end = torch.tensor([self.rows.first(length) for length in lengths], device=device)
        packed = ((token >= self.rows.sink) & (token < end.unsqueeze(1)))[..., None, None]
        k, v = (torch.where(packed, read, raw.double()) for read, raw in zip(self.read, self.raw, strict=True))
        return k, v

    def attend(self, q: torch.Tensor, packed_upto: Sequence[int], lengths: Sequence[int], rounded: torch.dtype | None = None) -> Pair:
        """Output and LSE of attention over `lengths`, with the blocks packed that were due at `packed_upto`, and K and V as numbers of
        `rounded`, if given.
        """
        k, v = (x if rounded is None else x.to(rounded).double() for x in self.seen(packed_upto))
        att, sinks = self.spec.attention, learned_sinks(self.spec, q.device)
        return attend(q, k, v, torch.tensor(lengths), softcap=att.softcap, window=att.window, sinks=sinks)
