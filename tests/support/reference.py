"""A whole KV cache as docs/numerics.md defines it: the oracle of append, flush, crop and attend for every back end."""

from __future__ import annotations

import torch

from kvgen.format.dtypes import torch_dtype
from kvgen.format.layout import PackedLayout, rotation_of
from kvgen.format.residual import residual_rows
from kvgen.format.rotation import rotate
from kvgen.spec import KernelSpec
from kvgen.verify.reference import Pair, WholeSequences


class ReferenceCache:
    """K and V of `batch` sequences, in any format of the spec language.

    `flush` quantizes every full block whose tokens are all older than the `local` newest; `crop` takes tokens back, up to `rollback`.
    """

    def __init__(self, spec: KernelSpec, batch: int, block: int) -> None:
        """`block` is the residual block size N_r in tokens."""
        self.spec, self.block = spec, block
        self.rows = residual_rows(spec, block)
        self.lengths, self.flushed, self.least = (torch.zeros(batch, dtype=torch.int32) for _ in range(3))
        """Tokens per sequence; those at its last flush; the length below which it can no longer be cropped: int32 [batch]."""
        shape = (batch, 0, spec.attention.kv_heads, spec.attention.head_dim)
        self.given = [torch.zeros(shape, dtype=torch_dtype(spec.attention.dtype)) for _ in range(2)]

    @property
    def blocks(self) -> torch.Tensor:
        """Quantized blocks per sequence, int32 [batch]."""
        return torch.tensor([self.rows.packed_blocks(length) for length in self.flushed.tolist()], dtype=torch.int32)

    def append(self, k: torch.Tensor, v: torch.Tensor, new_lengths: torch.Tensor | None = None) -> None:
        """Add the first new_lengths[b] (all, where None) of k[b], v[b] [batch, tokens, kv_heads, head_dim], unquantized."""
        counts = torch.full_like(self.lengths, k.shape[1]) if new_lengths is None else new_lengths.to(torch.int32)
        more = max(0, int((self.lengths + counts).max()) - self.given[0].shape[1])
        for which, x in enumerate((k, v)):
            held = self.given[which]
            assert x.dtype == held.dtype
            held = self.given[which] = torch.cat([held, held.new_zeros(held.shape[0], more, *held.shape[2:])], 1)
            for b, (start, count) in enumerate(zip(self.lengths.tolist(), counts.tolist(), strict=True)):
                held[b, start : start + count] = x[b, :count]
        self.lengths = self.lengths + counts

    def flush(self) -> None:
        """Quantize every block that is due."""
        self.flushed = self.lengths.clone()

    def crop(self, tokens: torch.Tensor | int) -> None:
        """Take back the newest tokens[b] tokens of each sequence, or the same number of each that has any.

        Raises ValueError below a length that is `cache.rollback` under the longest that the sequence had.
        """
        counts = torch.where(self.lengths > 0, tokens, 0).to(torch.int32)
        self.least = torch.maximum(self.least, self.lengths - self.rows.rollback)
        lengths = self.lengths - counts
        if bool((counts < 0).any() | (lengths < self.least).any()):
            raise ValueError(f"at most {self.rows.rollback} tokens can be taken back, as many as a sequence has")
        self.lengths, self.flushed = lengths, torch.minimum(self.flushed, lengths)

    def prefill(self, k: torch.Tensor, v: torch.Tensor, new_lengths: torch.Tensor | None = None) -> None:
        """`append`, then `flush`, like `pack` of a module."""
        self.append(k, v, new_lengths)
        self.flush()

    def attend(
        self, q: torch.Tensor, *, scale: float | None = None, sinks: torch.Tensor | None = None, rounded: torch.dtype | None = None
    ) -> Pair:
        """Output [batch, q_len, q_heads, head_dim] and LSE [batch, q_heads, q_len] (fp64) of the newest q_len positions."""
        assert (sinks is not None) == self.spec.attention.sinks
        return self._whole().attend(q, self.flushed.tolist(), self.lengths.tolist(), rounded, scale=scale, sinks=sinks)

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
        longest = int(self.lengths.max())
        past = (torch.arange(longest) >= self.lengths.unsqueeze(1))[..., None, None]
        k, v = (x[:, :longest].masked_fill(past, 0.0) for x in self._whole().seen(self.flushed.tolist()))
        return k, v

    def packed(self, layout: PackedLayout, blocks: int | None = None) -> torch.Tensor:
        """The contiguous cache: uint8 [batch, kv_heads, blocks, block_bytes], 0 where nothing is packed."""
        full = self.blocks
        count = int(full.max()) if blocks is None else blocks
        out = torch.zeros(len(full), self.spec.attention.kv_heads, count, layout.block_bytes, dtype=torch.uint8)
        if int(full.max()):
            packed = self._whole().packed(layout)
            for b, n in enumerate(full.tolist()):
                out[b, :, :n] = packed[b, :, :n]
        return out

    def paged(self, layout: PackedLayout, block_table: torch.Tensor, pages: int, fill: int = 0) -> torch.Tensor:
        """The paged cache: uint8 [pages, kv_heads, page / N_r, block_bytes], `fill` where no sequence has a block.

        `block_table` int [batch, max_pages] names the page of every page / N_r blocks of a sequence.
        """
        assert self.spec.cache.page is not None
        per_page = self.spec.cache.page // self.block
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
        held = [torch.zeros(len(self.lengths), att.kv_heads, self.rows.rows, att.head_dim, dtype=x.dtype) for x in self.given]
        if self.rows.arrival:
            return held[0], held[1]
        rotated = [
            rotate(x, rotation_of(quant, att.head_dim)) for x, quant in zip(self.given, (self.spec.key, self.spec.value), strict=True)
        ]
        for b, (length, least) in enumerate(zip(self.lengths.tolist(), self.least.tolist(), strict=True)):
            first = self.rows.first(max(least, length - self.rows.rollback))
            positions = [*range(min(length, self.rows.sink)), *range(first, length)]
            for out, given in zip(held, rotated, strict=True):
                out[b][:, [self.rows.row(position) for position in positions]] = given[b, positions].transpose(0, 1)
        return held[0], held[1]

    def _whole(self) -> WholeSequences:
        return WholeSequences(self.spec, self.block, *self.given)
