"""Which tokens of a sequence are not quantized, in which rows of the residual tensors they lie, and where the packed blocks of a sliding
window do. `templates/common/include/kvgen/format.hpp` is the same for kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgen.format.layout import PackedLayout
    from kvgen.spec import KernelSpec

ANY = 2**30
"""Tokens: as many as a sequence can have."""
ROW_ALIGN = 16
"""Aligned runs of this many tokens after the sink are consecutive rows, so that kernels read them as one tile."""


@dataclass(frozen=True)
class ResidualRows:
    """The unquantized tokens: the first `sink` ones, and those that no packed block holds.

    Block i of a sequence holds the positions from sink + i * block on. All is a function of the sequence's length.
    """

    block: int
    """Tokens of a packed block, N_r."""
    sink: int
    local: int
    """The newest tokens that are never packed."""
    rollback: int
    """Tokens that may be taken back."""
    q_len: int
    """Most tokens of a decode step."""
    arrival: bool = False
    """Whether tokens are quantized as they arrive: then there are no rows, and the last block of a sequence may be partly filled."""

    @property
    def capacity(self) -> int:
        """Rows after the sink, which are used in turn.

        After `rollback` tokens were taken back, up to `local + block - 1` tokens before them are unquantized. A step writes its tokens
        while the older ones are still read, hence `q_len`.
        """
        if self.arrival:
            return 0
        needed = self.block + self.local + (self.rollback + self.q_len if self.rollback else 0)
        return -(-needed // ROW_ALIGN) * ROW_ALIGN

    @property
    def rows(self) -> int:
        """Rows of the residual tensors, per sequence and KV head."""
        return self.sink + self.capacity

    def packed_blocks(self, length: int) -> int:
        """Blocks that hold packed tokens of a sequence of `length` tokens."""
        if self.arrival:
            return -(-length // self.block)
        return max(0, length - self.sink - self.local) // self.block

    def first(self, length: int) -> int:
        """The first position after the packed tokens. All positions from it on are unquantized."""
        if self.arrival:
            return length
        return self.sink + self.packed_blocks(length) * self.block

    def filling(self, length: int) -> int:
        """The block that the next tokens fill."""
        return length // self.block if self.arrival else self.packed_blocks(length)

    def almost_full(self, near: int) -> int:
        """A length near another one, at which one token more completes a block."""
        return (near // self.block * self.block if self.arrival else self.first(near) + self.local) + self.block - 1

    def row(self, position: int) -> int:
        """The row of an unquantized token."""
        return position if position < self.sink else self.sink + (position - self.sink) % self.capacity


def residual_rows(spec: KernelSpec, block: int) -> ResidualRows:
    """The unquantized tokens of a spec whose packed blocks have `block` tokens."""
    cache = spec.cache
    return ResidualRows(block, cache.sink, cache.local, most_rollback(spec), spec.attention.q_len, cache.quantize == "arrival")


def most_rollback(spec: KernelSpec) -> int:
    """Most tokens that may be taken back: all, where they are quantized as they arrive."""
    return ANY if spec.cache.quantize == "arrival" else spec.cache.rollback


def window_places(spec: KernelSpec, block: int) -> int:
    """Places for the packed blocks of a sequence: block i lies in place i mod this number. 0 if every block has a place of its own.

    A step sees at most `window + q_len - 1` tokens, after `rollback` tokens were taken back. They lie in that many blocks and one more;
    one more block may be packed before all of them were read. Tokens that are quantized as they arrive are written before older ones are
    read, however many there are, and any number may be taken back: their blocks have places of their own.
    """
    window = spec.attention.window
    if window is None or spec.cache.page is not None or spec.cache.quantize == "arrival":
        return 0
    return -(-(window + spec.attention.q_len - 1 + spec.cache.rollback) // block) + 2


def first_held(spec: KernelSpec, block: int, length: int) -> int:
    """The first packed block that is still there in a sequence of `length` tokens, up to `rollback` of which were taken back."""
    places = window_places(spec, block)
    return max(0, residual_rows(spec, block).packed_blocks(length + spec.cache.rollback) - places) if places else 0


def cache_id(spec: KernelSpec, layout: PackedLayout) -> str:
    """Identifies caches that a kernel reads alike: the packed layout, where unquantized tokens lie, and the places of a sliding window."""
    cache, places = spec.cache, window_places(spec, layout.tokens)
    found = layout.id
    if cache.quantize == "arrival":
        found += ".arrival"
    if cache.sink or cache.local or cache.rollback:
        found += f".s{cache.sink}l{cache.local}c{residual_rows(spec, layout.tokens).capacity}"
    return f"{found}.{places}" if places else found
