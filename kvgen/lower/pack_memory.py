"""Shared memory for packing a block on a GPU: both GPU back ends pack with the same kernels."""

from __future__ import annotations

from kvgen.arch import KB
from kvgen.format.layout import Operand, PackedLayout

MOST_PACK = 48 * KB
"""Shared memory of a kernel that does not ask for more."""


def pack_memory(layout: PackedLayout) -> int:
    """Bytes for packing a block: per channel, extremes of runs of 16 tokens, and params of groups; of K, sums for the boost; then of V.

    Every module asserts that its headers need as many (`pack_smem_bytes`).
    """
    scaled = [op for op in (layout.key, layout.value) if op.per_channel]
    return max([16, *(layout.head_dim * (layout.tokens // 16 * 4 + layout.tokens // op.group * 12) + _boosting(layout, op)
                      for op in scaled)])  # fmt: skip


def too_many_scales(layout: PackedLayout) -> str | None:
    """Why a packing kernel's shared memory does not hold the scales of a block, or None."""
    if pack_memory(layout) <= MOST_PACK:
        return None
    groups = [f"{name}.group {op.group}" for name, op in (("key", layout.key), ("value", layout.value)) if op.per_channel]
    what = f"head_dim {layout.head_dim} with {' and '.join(groups)} needs blocks of {layout.tokens} tokens"
    return f"{what}, and packing one needs {pack_memory(layout)} bytes of shared memory, more than {MOST_PACK}"


def _boosting(layout: PackedLayout, op: Operand) -> int:
    """Four sums of magnitudes and a sort key per channel, as far as the selector needs them; which channels are chosen, per group."""
    if op.boost is None:
        return 0
    doubles, groups = {"mean_abs": 5, "range": 1, "static": 0}[op.boost.select], layout.tokens // op.group
    return layout.head_dim * (doubles * 8 + groups) + groups * op.boosted
