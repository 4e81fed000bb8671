"""Memory and threads of processes, from /proc; 0 for a process that has ended."""

from __future__ import annotations

import os
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process, without pages of files: a library that is used for the first time brings many."""
    _, resident, shared, *_ = _statm(pid)
    return (resident - shared) * PAGE


def data_bytes(pid: int | str = "self") -> int:
    """Private writable memory that a process has mapped, touched or not: the quantity that RLIMIT_DATA limits."""
    return _statm(pid)[5] * PAGE


def threads(pid: int | str = "self") -> int:
    """Threads of a process."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def _statm(pid: int | str) -> list[int]:
    """Pages: size, resident, shared, text, lib, data, dirty."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/statm").read_text().split()]
    except OSError:
        return [0] * 7
