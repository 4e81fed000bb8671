"""Memory for caches on the CPU, in pages of 2 MB where the system has them.

A processor looks up the page of every address in a small table, the TLB. Attention reads a whole cache once, so with pages of 4 KB most of
these look-ups miss, and the misses delay the read. docs/cpu.md has figures.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

HUGE = 2 << 20
LEAST_BYTES = 2 * HUGE
"""Smaller memory is allocated by torch: it would have one huge page at most."""


def new_bytes(count: int, device: torch.device) -> torch.Tensor:
    """Memory of undefined content: uint8 [count]. On the CPU, from LEAST_BYTES on, it begins at a multiple of 2 MB, and Linux is asked for
    huge pages.

    A huge page is resident as a whole once a byte of it is written. Where the system gives no huge pages, the same memory has small ones.
    Raises MemoryError if there is not enough memory on the CPU.
    """
    if device.type != "cpu" or count < LEAST_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(count, dtype=torch.uint8, device=device)
    try:
        memory = mmap.mmap(-1, count + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"there are no {count} bytes of memory: {error.strerror}") from error
    skipped = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % HUGE
    with suppress(OSError):  # a kernel that was built without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, skipped, count // HUGE * HUGE)
    return torch.frombuffer(memory, dtype=torch.uint8, offset=skipped, count=count)
