"""Resources of a streaming multiprocessor, by architecture."""

from __future__ import annotations

from dataclasses import dataclass

from kvgen.lower.base import Target

KB = 1024
REGISTERS = 65536
CTA_RESERVED = 1 * KB
"""Shared memory that CUDA reserves for every resident CTA, in bytes."""


@dataclass(frozen=True)
class Machine:
    """Limits of one multiprocessor, in bytes, and how many there are."""

    shared_per_cta: int
    shared_per_sm: int
    in_flight: int
    """Bytes that copies must keep under way to cover the latency of memory (bandwidth of a multiprocessor times 0.7 us)."""
    warps: int
    """Most resident warps."""
    processors: int
    """Multiprocessors of the usual GPU: for the search, not for the launch."""
    bulk: bool
    """1-D bulk copies, clusters and distributed shared memory."""


MACHINES: dict[Target, Machine] = {
    "sm80": Machine(163 * KB, 164 * KB, 12 * KB, 64, 108, False),
    "sm89": Machine(99 * KB, 100 * KB, 6 * KB, 48, 128, False),
    "sm90": Machine(227 * KB, 228 * KB, 24 * KB, 64, 132, True),
}
