"""K and V of sequences as they grow, and attention over them: the fp64 reference of the life cycles of small caches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvgen.reference.attention import attend
from kvgen.reference.layout import PackedLayout
from kvgen.reference.packing import from_blocks, pack_blocks, to_blocks, unpack_blocks
from kvgen.spec import KernelSpec


@dataclass(frozen=True)
class Life:
    """K and V of whole sequences, [batch, tokens, kv_heads, head_dim] in whole blocks: as given, and as they read back when packed."""

    spec: KernelSpec
    layout: PackedLayout
    raw: tuple[torch.Tensor, torch.Tensor]
    read: tuple[torch.Tensor, torch.Tensor]
    """fp64."""
    blocks: torch.Tensor
    """Packed by the reference: uint8 [batch, kv_heads, blocks, block_bytes]."""

    @classmethod
    def of(cls, spec: KernelSpec, layout: PackedLayout, k: torch.Tensor, v: torch.Tensor) -> Life:
        """The life of K and V."""
        blocks = pack_blocks(layout, to_blocks(k, layout.tokens), to_blocks(v, layout.tokens))
        read_k, read_v = (from_blocks(x) for x in unpack_blocks(layout, blocks, k.dtype))
        return cls(spec, layout, (k, v), (read_k, read_v), blocks)

    def slice(self, which: int, starts: tuple[int, ...], count: int) -> torch.Tensor:
        """`count` tokens of every sequence from its own start, [batch, count, kv_heads, head_dim]; zeros past the data."""
        x = self.raw[which]
        padded = torch.cat([x, x.new_zeros((x.shape[0], count, *x.shape[2:]))], 1)
        return torch.stack([padded[b, start : start + count] for b, start in enumerate(starts)])

    def both(self, starts: tuple[int, ...], count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`slice` of K and of V."""
        return self.slice(0, starts, count), self.slice(1, starts, count)

    def seen(self, lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V in fp64 as attention sees them: full blocks as they read back, the rest as given."""
        device, tokens = self.raw[0].device, self.layout.tokens
        token = torch.arange(self.raw[0].shape[1], device=device)
        full = torch.tensor([length // tokens * tokens for length in lengths], device=device)
        packed = (token < full.unsqueeze(1))[..., None, None]
        return torch.where(packed, self.read[0], self.raw[0].double()), torch.where(packed, self.read[1], self.raw[1].double())

    def attend(self, q: torch.Tensor, packed_upto: tuple[int, ...], lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE of attention over `lengths`, with the blocks packed that were full at `packed_upto`."""
        k, v = self.seen(packed_upto)
        attention = self.spec.attention
        return attend(q, k, v, torch.tensor(lengths), softcap=attention.softcap, window=attention.window)
