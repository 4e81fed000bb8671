"""Layers that share sequences, beside their references: what calls read and write, and what must agree after them."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch

from kvgen.format.window import first_held, window_places
from kvgen.runtime.kvcache import KVCache
from kvgen.runtime.variant import Variant
from kvgen.verify.cache import ReferenceCache
from kvgen.verify.calls import poison, poisoned
from kvgen.verify.tolerance import relative_l2, row_tolerance, tolerance, worst_relative_l2
from tests.lives.drawn import KINDS, drawn_query, drawn_sinks, drawn_tensor
from tests.lives.memory import placed
from tests.support.packed import meaningful_bytes, sequence_blocks


class Wrong(Exception):
    """What differs from the reference."""


def require(holds: bool, what: str) -> None:
    """Raises Wrong unless it holds."""
    if not holds:
        raise Wrong(what)


class Layers:
    """Caches of one layout on a device, of as many layers, that `launches` may be called over."""

    def __init__(self, launches: Sequence[Variant], draw: Random, device: str = "cpu", *, exact: bool = True) -> None:
        """`exact`: whether the launches carry the rounding errors that `exact_q: false` leaves out."""
        self.launches, self.draw, self.device, self.exact = launches, draw, torch.device(device), exact
        self.spec, self.layout = launches[0].spec, launches[0].layout
        self.attention = self.spec.attention
        self.batch = draw.randint(1, 4)
        unpacked = self.spec.cache.unpacked + self.spec.cache.rollback
        tokens = min(draw.randint(1, 4) * self.layout.tokens, 1300) if draw.random() < 0.95 else 4500  # several splits
        self.room = tokens + unpacked + draw.randint(0, 40)
        self.caches = self._caches(draw.choice([1, 1, 1, 2]))
        self.references = [ReferenceCache(self.spec, self.batch, self.layout.tokens) for _ in self.caches]
        self.longest = [0] * self.batch
        self.kinds = [draw.choice(KINDS) for _ in range(2)]
        self.calls: list[str] = []

    @property
    def lengths(self) -> list[int]:
        """Of the reference."""
        lengths: list[int] = self.references[0].lengths.tolist()
        return lengths

    @property
    def left(self) -> int:
        """Tokens for which every sequence has room, as far as the host knows: of ragged counts it adds the largest."""
        return self.room - self.caches[0].bound

    # --- comparisons ---------------------------------------------------------------------------------------------------

    def agree(self, out: torch.Tensor, lse: torch.Tensor, want: torch.Tensor, want_lse: torch.Tensor) -> None:
        """Results and the reference's."""
        limit = tolerance(out.dtype)
        require(relative_l2(out, want) <= limit, f"relative l2 of the output is {relative_l2(out, want):.3g}")
        worst = worst_relative_l2(out, want)
        require(worst <= row_tolerance(self.spec.attention.dtype, exact=self.exact), f"the worst row is off by {worst:.3g}")
        seen = torch.isfinite(want_lse)
        require(torch.equal(lse[~seen].double(), want_lse[~seen]), "the LSE of a query that sees nothing")
        error = ((lse - want_lse).abs() / (1 + want_lse.abs()))[seen]
        require(not error.numel() or float(error.max()) <= limit, f"the LSE is off by {float(error.max() if error.numel() else 0):.3g}")

    def lengths_agree(self) -> None:
        """Of cache and reference."""
        got = self.caches[0].lengths.tolist()
        require(got == self.lengths, f"lengths are {got}, not {self.lengths}")

    def contents_agree(self) -> None:
        """Residual rows to the bit, packed blocks to the byte, and what `unpack` gives."""
        places, kept = window_places(self.spec, self.layout.tokens), meaningful_bytes(self.layout)
        for number, (cache, reference) in enumerate(zip(self.caches, self.references, strict=True)):
            want, rows = reference.packed(self.layout), reference.rows
            keys, values, packed, *residuals = (
                x.cpu() for x in (*self.launch().unpack(cache), cache.packed, cache.k_residual, cache.v_residual)
            )
            table = None if cache.block_table is None else cache.block_table.cpu()
            truth = reference.keys_values()
            for b, length in enumerate(self.lengths):
                where = f"layer {number}, sequence {b} of {length} tokens"
                first = first_held(self.spec, self.layout.tokens, max(length, self.longest[b] - self.spec.cache.rollback))
                got = sequence_blocks(packed, table, b)
                for block in range(first, rows.packed_blocks(length)):
                    mine, other = got[:, block % places if places else block], want[b, :, block]
                    require(torch.equal(mine[:, kept], other[:, kept]), f"{where}: packed block {block}")
                unquantized = [*range(min(length, rows.sink)), *range(rows.first(length), length)]
                at = [rows.row(position) for position in unquantized]
                for mine, other in zip(residuals, reference.residual(), strict=True):
                    require(torch.equal(mine[b][:, at], other[b][:, at]), f"{where}: residual")
                held = [*range(min(length, rows.sink)), *range(max(rows.sink, rows.sink + first * self.layout.tokens), length)]
                for mine, other in zip((keys, values), truth, strict=True):
                    error = relative_l2(mine[b, held], other[b, held]) if held else 0.0
                    require(error <= tolerance(mine.dtype), f"{where}: unpacked")

    # --- help ----------------------------------------------------------------------------------------------------------

    def said(self, what: str) -> None:
        """Keep a call for the report."""
        self.calls.append(f"{what} at {self.lengths}")

    def launch(self) -> Variant:
        """Any of the launches."""
        return self.draw.choice(self.launches)

    def new(self, tokens: int, batch: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [batch, tokens, kv_heads, head_dim]."""
        size = (batch or self.batch, tokens, self.attention.kv_heads)
        k, v = (drawn_tensor(self.draw, kind, *size, self.spec) for kind in self.kinds)
        return k, v

    def query(self, tokens: int, reference: ReferenceCache) -> torch.Tensor:
        """For as many positions of every sequence."""
        return drawn_query(self.draw, self.spec, self.batch, tokens, reference.keys_values()[0])

    def sinks(self) -> torch.Tensor | None:
        """Learned sinks of a spec that has them."""
        drawn = drawn_sinks(self.draw, self.spec)
        return None if drawn is None else drawn.to(self.device)

    def scale(self) -> float | None:
        """The default, half of it, or a negative one."""
        plain: float = self.attention.head_dim**-0.5
        return self.draw.choice([None, None, 0.5 * plain, -plain])

    def there(self, *views: torch.Tensor) -> list[torch.Tensor]:
        """Views on the device, within the same memory as here."""
        return [placed(x, self.device) for x in views]

    def results(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Poisoned memory for what a call with q [batch, q_len, q_heads, head_dim] gives; the output has a gap between tokens."""
        batch, tokens, heads, dim = q.shape
        out = poisoned((batch, tokens, heads + 1, dim), q.dtype, self.device)[:, :, 1:]
        return out, poisoned((batch, heads, tokens), torch.float32, self.device)

    def grown(self) -> None:
        """Note the longest that each sequence has been."""
        self.longest = [max(pair) for pair in zip(self.longest, self.lengths, strict=True)]

    def forgotten(self, rows: Sequence[int]) -> None:
        """Sequences that are empty now."""
        for b in rows:
            self.longest[b] = 0
            for reference in self.references:
                reference.lengths[b] = reference.blocks[b] = reference._least[b] = 0

    def _caches(self, layers: int) -> list[KVCache]:
        """Poisoned caches; pages are shuffled among others."""
        page, table, pages = self.spec.cache.page, None, None
        if page is not None:
            need = -(-self.room // page)
            pages = self.batch * need + 3
            order = torch.randperm(pages, generator=torch.Generator().manual_seed(self.draw.getrandbits(30)))
            table = order[: self.batch * need].reshape(self.batch, need).to(torch.int32)
        first = poison(self.launches[0].new_cache(self.batch, self.room, self.device, table, pages))
        return [first, *(poison(self.launches[0].new_cache(like=first)) for _ in range(layers - 1))]
