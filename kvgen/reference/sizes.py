"""What a format takes of memory, from its packed layout."""

from __future__ import annotations

from math import lcm

from kvgen.reference.layout import PackedLayout, packed_layout
from kvgen.reference.residual import residual_rows
from kvgen.spec import KernelSpec

BLOCK = 128
"""Tokens of a packed block where the format leaves them open; no size depends on them but Kitty's index, per group of tokens."""


def layout_of_format(spec: KernelSpec) -> PackedLayout:
    """The layout of a format in blocks of 128 tokens, or of the least number that holds its groups and fits its pages.

    Raises ValueError where no layout holds the spec.
    """
    groups = [quant.group for quant in (spec.key, spec.value) if quant.quantized and quant.axis == "channel"]
    block, page = lcm(BLOCK, *groups), spec.cache.page
    return packed_layout(spec, block if page is None or page % block == 0 else page, "simd")


def bits_per_element(spec: KernelSpec) -> float:
    """Bits per element of K and V in packed blocks, with all scales, zeros and indices, without padding and unquantized tokens."""
    layout = layout_of_format(spec)
    return layout.payload_bytes * 8 / (2 * layout.tokens * layout.head_dim)


def bits_at(spec: KernelSpec, length: int) -> float:
    """Bits per element of a sequence of `length` tokens with its unquantized ones: sink, local, and those of a block that is not full."""
    layout = layout_of_format(spec)
    elements = 2 * layout.head_dim
    full = residual_rows(spec, layout.tokens).packed_blocks(length)
    wide = 32 if spec.attention.dtype == "float32" else 16
    rest = (length - full * layout.tokens) * elements * wide
    return (full * layout.payload_bytes * 8 + rest) / (length * elements)


def token_bytes(spec: KernelSpec, layers: int) -> float:
    """Bytes of a packed token in all layers and KV heads of a model, padding of blocks included, unquantized tokens not."""
    layout = layout_of_format(spec)
    return layers * spec.attention.kv_heads * layout.block_bytes / layout.tokens
