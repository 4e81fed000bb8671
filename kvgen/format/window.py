"""Where the packed blocks of a contiguous cache with a sliding window lie: in a few places, which are used in turn.

`templates/common/include/kvgen/window_places.hpp` is the same for kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgen.format.residual import residual_rows

if TYPE_CHECKING:
    from kvgen.format.layout import PackedLayout
    from kvgen.spec import KernelSpec


def window_places(spec: KernelSpec, block: int) -> int:
    """Places for the packed blocks of a sequence: block i lies in place i mod this number. 0 if every block has a place of its own.

    A step sees at most `window + q_len - 1` tokens, after `rollback` tokens were taken back. They lie in that many blocks and one more;
    one more block may be packed before all of them were read.
    """
    window = spec.attention.window
    if window is None or spec.cache.page is not None:
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
    if cache.sink or cache.local or cache.rollback:
        found += f".s{cache.sink}l{cache.local}c{residual_rows(spec, layout.tokens).capacity}"
    return f"{found}.{places}" if places else found
