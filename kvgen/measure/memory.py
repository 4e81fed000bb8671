"""Memory of this machine and of processes, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

FALLBACK_BYTES = 8 << 30


def available_bytes() -> int:
    """Memory that can be taken without swapping, the smaller of the machine's and the control group's."""
    free = FALLBACK_BYTES
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) << 10
    group = Path("/sys/fs/cgroup")
    most, used = _number(group / "memory.max"), _number(group / "memory.current")
    return free if most is None or used is None else min(free, max(0, most - used))


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 when it is gone."""
    lines = _lines(Path(f"/proc/{pid}/statm"))
    return int(lines[0].split()[1]) * os.sysconf("SC_PAGE_SIZE") if lines else 0


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _number(file: Path) -> int | None:
    lines = _lines(file)
    return int(lines[0]) if lines and lines[0].isdigit() else None
