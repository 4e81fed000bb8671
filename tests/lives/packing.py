"""Random prefills by the emulated CUDA packer: bytes, residuals, and what `unpack` gives, against the fp64 reference."""

from __future__ import annotations

from random import Random

import torch

from kvgen.format.layout import PackedLayout
from kvgen.format.window import first_held, window_places
from kvgen.spec import KernelSpec
from kvgen.verify.cache import ReferenceCache
from kvgen.verify.quantize import torch_dtype
from tests.lives.drawn import KINDS, dense, drawn_tensor
from tests.lives.layers import require
from tests.support.packed import meaningful_bytes, sequence_blocks
from tests.unit.lower_cuda import emulate

PIECES = 4
UNTOUCHED = 7.0


class PackLife:
    """A cache that is filled in pieces; tokens are taken back in between. Raises Wrong at the first difference."""

    def __init__(self, module: emulate.Emulated, spec: KernelSpec, layout: PackedLayout, draw: Random) -> None:
        self.module, self.spec, self.layout, self.draw = module, spec, layout, draw
        block, self.batch = layout.tokens, draw.randint(1, 4)
        self.held, self.places = ReferenceCache(spec, self.batch, block), window_places(spec, block)
        sizes = [
            [draw.choice([0, 1, draw.randint(0, block), draw.randint(0, 3 * block)]) for _ in range(self.batch)] for _ in range(PIECES)
        ]
        self.pieces, self.kinds = sizes, [draw.choice(KINDS) for _ in range(2)]
        self.longest = [0] * self.batch
        self.mine = self._empty(sum(map(max, sizes)) + block)

    def live(self) -> None:
        """All pieces, then `unpack`."""
        for piece in self.pieces:
            counts = torch.tensor(piece, dtype=torch.int32)
            new = (drawn_tensor(self.draw, kind, self.batch, max(piece) + 1, self.heads, self.spec) for kind in self.kinds)
            k, v = map(dense, new)
            self.module.pack(self.mine, k, v, counts, backwards=self.draw.random() < 0.5)
            self.held.prefill(k, v, counts)
            self.longest = [max(pair) for pair in zip(self.longest, self.held.lengths.tolist(), strict=True)]
            self._agree(f"after {piece} of {self.pieces}, {self.kinds}")
            if self.spec.cache.rollback and self.draw.random() < 0.5:
                self.held.crop(drawn_crop(self.draw, self.held))
                self.mine.lengths.copy_(self.held.lengths)
        self._unpack()

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.spec.attention.kv_heads

    def _size(self, block: int) -> int:
        return self.draw.choice([0, 1, self.draw.randint(0, block), self.draw.randint(0, 3 * block)])

    def _empty(self, room: int) -> emulate.Cache:
        block, page, table = self.layout.tokens, self.spec.cache.page, None
        blocks = -(-room // block)
        shape = (self.batch, self.heads, min(blocks, self.places or blocks), self.layout.block_bytes)
        if page:
            need = -(-room // page)
            order = torch.randperm(self.batch * need, generator=torch.Generator().manual_seed(self.draw.getrandbits(30)))
            table, shape = order.int().reshape(self.batch, need), (self.batch * need, self.heads, page // block, self.layout.block_bytes)
        rows = (self.batch, self.heads, self.held.rows.rows, self.layout.head_dim)
        k, v = (torch.full(rows, torch.nan, dtype=torch_dtype(self.spec.attention.dtype)) for _ in range(2))
        return emulate.Cache(torch.full(shape, 255, dtype=torch.uint8), k, v, torch.zeros(self.batch, dtype=torch.int32), table)

    def _agree(self, where: str) -> None:
        held, kept, want = self.held, meaningful_bytes(self.layout), self.held.packed(self.layout)
        require(torch.equal(self.mine.lengths, held.lengths), f"lengths {where}")
        for found, expected in zip((self.mine.k_residual, self.mine.v_residual), held.residual(), strict=True):
            used = expected.ne(0).any(-1)
            require(torch.equal(found[used], expected[used]), f"residual {where}")
        for b, full in enumerate(held.blocks.tolist()):
            found = sequence_blocks(self.mine.packed, self.mine.block_table, b)
            first = max(0, held.rows.packed_blocks(self.longest[b]) - self.places) if self.places else 0
            for index in range(first, full):
                mine = found[:, index % self.places if self.places else index]
                require(torch.equal(mine[..., kept], want[b, :, index][..., kept]), f"packed block {index} of sequence {b} {where}")

    def _unpack(self) -> None:
        shape = (self.batch, int(self.held.lengths.max()) + 2, self.heads, self.layout.head_dim)
        out = [torch.full(shape, UNTOUCHED, dtype=self.mine.k_residual.dtype) for _ in range(2)]
        self.module.unpack(self.mine, *out)
        for found, exact in zip(out, self.held.keys_values(), strict=True):
            for b, length in enumerate(self.held.lengths.tolist()):
                gone = first_held(self.spec, self.layout.tokens, length) * self.layout.tokens
                want = exact[b, gone:length].float().to(found.dtype)
                require(torch.equal(found[b, gone:length], want), f"unpacked sequence {b} of {length} tokens")
                require(bool((found[b, length:] == UNTOUCHED).all()), f"unpacked beyond sequence {b}")


def drawn_crop(draw: Random, held: ReferenceCache) -> torch.Tensor:
    """As many tokens as may be taken back of each sequence, or fewer: int32 [batch]."""
    least = torch.maximum(held._least, held.lengths - held.rows.rollback).clamp(min=0)
    return torch.tensor([draw.randint(0, n) for n in (held.lengths - least).tolist()], dtype=torch.int32)
