"""A whole KV cache as the numerics section defines it: the oracle of append, flush and attend for every back end."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvgen.format.layout import PackedLayout
from kvgen.format.residual import residual_rows
from kvgen.spec import BoostSpec, KernelSpec
from kvgen.verify.attention import attend
from kvgen.verify.packing import OPERANDS, from_blocks, to_blocks, write_operand
from kvgen.verify.quantize import Quant, dequantize, quantize, torch_dtype


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

    # --- what a module does ----------------------------------------------------------------------------------

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
        due = [self.rows.packed_blocks(length) for length in self.lengths.tolist()]
        self._quantize(0, self.spec.key, self.spec.key.boost, due)
        self._quantize(1, self.spec.value, None, due)
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
    ) -> tuple[torch.Tensor, torch.Tensor]:
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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`append`, `attend`, then `flush`: the new tokens, and the residual before them, are attended unquantized."""
        self.append(k, v)
        result = self.attend(q, scale=scale, sinks=sinks)
        self.flush()
        return result

    # --- expected contents of a module's tensors -----------------------------------------------------------------------

    def keys_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as attention reads them: fp64 [batch, longest length, kv_heads, head_dim], 0 past a sequence's length."""
        k, v = self._read
        longest = int(self.lengths.max())
        return k[:, :longest].clone(), v[:, :longest].clone()

    def packed(self, layout: PackedLayout, blocks: int | None = None) -> torch.Tensor:
        """The contiguous cache: uint8 [batch, kv_heads, blocks, block_bytes], 0 where nothing is packed."""
        if layout.tokens != self.block:
            raise ValueError(f"the layout has blocks of {layout.tokens} tokens, the cache of {self.block}")
        heads = self.spec.attention.kv_heads
        count = int(self.blocks.max()) if blocks is None else blocks
        out = torch.zeros(len(self.lengths), heads, count, layout.block_bytes, dtype=torch.uint8)
        for which, x in zip(OPERANDS, self._given, strict=True):
            for b, n in enumerate(self.blocks.tolist()):
                if n:
                    write_operand(layout, which, out[b, :, :n], to_blocks(self._held(x, b, 0, n), self.block)[0])
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

    def residual(self) -> tuple[torch.Tensor, torch.Tensor]:
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

    # --- inside ------------------------------------------------------------------------------------------------------

    def _reserve(self, length: int) -> None:
        """Room for `length` tokens per sequence; doubles, so that appending token by token stays cheap."""
        held = self._given[0].shape[1]
        if length <= held:
            return
        more = max(length, 2 * held) - held
        for buffers in (self._given, self._read):
            for which, old in enumerate(buffers):
                buffers[which] = torch.cat([old, old.new_zeros(old.shape[0], more, *old.shape[2:])], dim=1)

    def _held(self, x: torch.Tensor, b: int, first: int, last: int) -> torch.Tensor:
        """Tokens of blocks first to last of sequence b: [1, tokens, kv_heads, head_dim]."""
        start = self.spec.cache.sink
        return x[b : b + 1, start + first * self.block : start + last * self.block]

    def _quantize(self, which: int, quant: Quant, boost: BoostSpec | None, due: Sequence[int]) -> None:
        """Quantize and dequantize blocks blocks[b] to due[b] of K (0) or V (1)."""
        for b, (first, last) in enumerate(zip(self.blocks.tolist(), due, strict=True)):
            if last > first and quant.bits != 16:
                blocks = to_blocks(self._held(self._given[which], b, first, last), self.block)
                self._held(self._read[which], b, first, last)[:] = from_blocks(dequantize(quantize(blocks, quant, boost), quant))
