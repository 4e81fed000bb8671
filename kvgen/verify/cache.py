"""What a cache holds of known tokens: the oracle of its contents and of attention over them, for any lengths, on any device."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from kvgen.format.layout import PackedLayout
from kvgen.format.residual import residual_rows
from kvgen.spec import KernelSpec
from kvgen.verify.attention import attend
from kvgen.verify.data import learned_sinks
from kvgen.verify.packing import from_blocks, pack_blocks, to_blocks
from kvgen.verify.quantize import dequantize, quantize

Pair = tuple[torch.Tensor, torch.Tensor]


class WholeSequences:
    """K and V of whole sequences, [batch, tokens, kv_heads, head_dim] as they are appended, in any format of the spec language.

    What a cache holds follows from lengths. Positions below `cache.sink` stay in dtype; of the others, block i holds the positions
    sink + [i * block, (i + 1) * block). A block is quantized once all of its tokens are older than the `local` newest. Other tokens read
    back as appended.
    """

    def __init__(self, spec: KernelSpec, block: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """`block` is the residual block size N_r in tokens. Raises ValueError if a group does not divide it."""
        self.spec, self.raw, self.rows = spec, (k, v), residual_rows(spec, block)
        self._read = tuple(self._read_back(x, quant) for x, quant in zip(self.raw, (spec.key, spec.value), strict=True))

    def packed(self, layout: PackedLayout) -> torch.Tensor:
        """All whole blocks: uint8 [batch, kv_heads, blocks, block_bytes]."""
        return pack_blocks(layout, *(to_blocks(x[:, self.rows.sink :], layout.tokens) for x in self.raw))

    def seen(self, packed_upto: Sequence[int]) -> Pair:
        """K and V in fp64 as attention sees them, with the blocks quantized that are due at lengths [batch]."""
        token = torch.arange(self.raw[0].shape[1], device=self.raw[0].device)
        end = torch.tensor([self.rows.first(length) for length in packed_upto], device=token.device).unsqueeze(1)
        packed = ((token >= self.rows.sink) & (token < end))[..., None, None]
        k, v = (torch.where(packed, read, raw.double()) for read, raw in zip(self._read, self.raw, strict=True))
        return k, v

    def attend(
        self,
        q: torch.Tensor,
        packed_upto: Sequence[int],
        lengths: Sequence[int],
        rounded: torch.dtype | None = None,
        *,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> Pair:
        """Output [batch, q_len, q_heads, head_dim] and LSE [batch, q_heads, q_len] (fp64) of the last q_len positions of `lengths`, with
        the blocks quantized that are due at `packed_upto`: after a step its lengths, in a `decode` those before it.

        `sinks` [q_heads] are `learned_sinks` where None. `rounded`: the type to which K and V are rounded first, as extend attention on a
        GPU does.
        """
        k, v = (x if rounded is None else x.to(rounded).double() for x in self.seen(packed_upto))
        att, sinks = self.spec.attention, learned_sinks(self.spec, q.device) if sinks is None else sinks
        return attend(q, k, v, torch.tensor(lengths), scale=scale, softcap=att.softcap, window=att.window, sinks=sinks)

    def new(self, starts: Sequence[int], count: int) -> Pair:
        """`count` tokens of every sequence from its own start, K and V [batch, count, kv_heads, head_dim]; zeros past the data."""
        padded = (torch.cat([x, x.new_zeros((x.shape[0], count, *x.shape[2:]))], 1) for x in self.raw)
        k, v = (torch.stack([x[b, start : start + count] for b, start in enumerate(starts)]) for x in padded)
        return k, v

    def drafted(self, kept: Sequence[int]) -> WholeSequences:
        """The sequences with other tokens from `kept[b]` on, which will be taken back. No block may hold them yet."""
        token = torch.arange(self.raw[0].shape[1], device=self.raw[0].device)
        draft = (token >= torch.tensor(kept, device=token.device).unsqueeze(1))[..., None, None]
        other = copy.copy(self)
        other.raw = (torch.where(draft, -self.raw[0], self.raw[0]), torch.where(draft, -self.raw[1], self.raw[1]))
        return other

    def _read_back(self, x: torch.Tensor, quant: Any) -> torch.Tensor:
        """K or V with all whole blocks quantized, fp64."""
        if quant.bits == 16:
            return x.double()
        blocks = to_blocks(x[:, self.rows.sink :], self.rows.block)
        read = from_blocks(dequantize(quantize(blocks, quant, getattr(quant, "boost", None)), quant))
        sink, end = self.rows.sink, self.rows.sink + read.shape[1]
        return torch.cat([x[:, :sink].double(), read, x[:, end:].double()], 1)
