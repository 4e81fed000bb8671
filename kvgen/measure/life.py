"""K and V of sequences as they grow, and attention over them: the fp64 reference of the life cycles of small caches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvgen.format.layout import PackedLayout
from kvgen.format.residual import ResidualRows, residual_rows
from kvgen.spec import KernelSpec
from kvgen.verify.attention import attend
from kvgen.verify.data import learned_sinks
from kvgen.verify.packing import from_blocks, pack_blocks, to_blocks, unpack_blocks


def whole_tokens(spec: KernelSpec, layout: PackedLayout, tokens: int) -> int:
    """The least number of tokens, at least `tokens`, of which those after the sink are whole blocks."""
    sink = spec.cache.sink
    return sink + -(-max(0, tokens - sink) // layout.tokens) * layout.tokens


@dataclass(frozen=True)
class Life:
    """K and V of whole sequences, [batch, `whole_tokens`, kv_heads, head_dim]: as given, and as they read back when packed."""

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
        sink = spec.cache.sink
        blocks = pack_blocks(layout, *(to_blocks(x[:, sink:], layout.tokens) for x in (k, v)))
        read = (from_blocks(x) for x in unpack_blocks(layout, blocks, k.dtype))
        read_k, read_v = (torch.cat([given[:, :sink].double(), x], 1) for given, x in zip((k, v), read, strict=True))
        return cls(spec, layout, (k, v), (read_k, read_v), blocks)

    @property
    def rows(self) -> ResidualRows:
        """Which tokens are unquantized."""
        return residual_rows(self.spec, self.layout.tokens)

    def drafted(self, kept: tuple[int, ...]) -> Life:
        """The life with other tokens from `kept[b]` on, which will be taken back. No block may hold them yet."""
        token = torch.arange(self.raw[0].shape[1], device=self.raw[0].device)
        draft = (token >= torch.tensor(kept, device=token.device).unsqueeze(1))[..., None, None]
        k, v = self.raw
        return replace(self, raw=(torch.where(draft, -k, k), torch.where(draft, -v, v)))

    def slice(self, which: int, starts: tuple[int, ...], count: int) -> torch.Tensor:
        """`count` tokens of every sequence from its own start, [batch, count, kv_heads, head_dim]; zeros past the data."""
        x = self.raw[which]
        padded = torch.cat([x, x.new_zeros((x.shape[0], count, *x.shape[2:]))], 1)
        return torch.stack([padded[b, start : start + count] for b, start in enumerate(starts)])

    def both(self, starts: tuple[int, ...], count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`slice` of K and of V."""
        return self.slice(0, starts, count), self.slice(1, starts, count)

    def seen(self, lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V in fp64 as attention sees them: packed blocks as they read back, the rest as given."""
        device = self.raw[0].device
        token = torch.arange(self.raw[0].shape[1], device=device)
        end = torch.tensor([self.rows.first(length) for length in lengths], device=device)
        packed = ((token >= self.rows.sink) & (token < end.unsqueeze(1)))[..., None, None]
        return torch.where(packed, self.read[0], self.raw[0].double()), torch.where(packed, self.read[1], self.raw[1].double())

    def attend(
        self, q: torch.Tensor, packed_upto: tuple[int, ...], lengths: tuple[int, ...], rounded: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE of attention over `lengths`, with the blocks packed that were due at `packed_upto`, and K and V as numbers of
        `rounded`, if given.
        """
        k, v = (x if rounded is None else x.to(rounded).double() for x in self.seen(packed_upto))
        attention, sinks = self.spec.attention, learned_sinks(self.spec, q.device)
        return attend(q, k, v, torch.tensor(lengths), softcap=attention.softcap, window=attention.window, sinks=sinks)
