"""Memory for caches on the CPU, in pages of 2 MB where the system has them.

A processor looks up the page of every address in a small table, the TLB. Attention reads a whole cache once, so with pages of 4 KB most of
these look-ups miss, and the misses delay the read. docs/cpu.md has figures.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress

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


@contextmanager
def memory_for(what: str, count: int, device: torch.device) -> Iterator[None]:
    """Make one MemoryError of what torch and Python raise where the system refuses `count` bytes on the CPU: MemoryError, a RuntimeError of
    torch's allocator, or OverflowError for a number beyond 64 bits. On a GPU torch.OutOfMemoryError stays.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OverflowError) as error:
        if device.type != "cpu":
            raise
        raise MemoryError(f"{what} needs {count / 1e9:.1f} GB, and the system refuses them") from error
