"""Where and when an entry was made: device, driver, threads; version, commit and date."""

from __future__ import annotations

import platform
import subprocess
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from kvgen._machine import cores
from kvgen._nvml import gpu_identity
from kvgen.arch import Target
from kvgen.toolchain.compilers import cpu_name


@cache
def here(target: Target) -> dict[str, Any]:
    """Name of the device that the target means here, with the threads of a CPU or the driver of a GPU.

    The name is empty if there is no such device.
    """
    if target == "cpu":
        return {"name": cpu_name(), "threads": cores()}
    return {"name": "", **gpu_identity()}


def origin() -> str:
    """A description of this machine, stored with modules that are exported."""
    from kvgen import __version__

    return f"{cpu_name()} ({platform.machine()}, kvgen {__version__})"


def provenance() -> dict[str, Any]:
    """Facts for an entry made now; `commit` and `dirty` are None outside a checkout. `date` is UTC."""
    from kvgen import __version__

    commit = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain", "--untracked-files=no") if commit else None
    return {
        "kvgen": __version__,
        "commit": commit,
        "dirty": bool(status) if status is not None else None,
        "date": datetime.now(timezone.utc).isoformat(timespec="microseconds"),
    }


def _git(*words: str) -> str | None:
    """Output of git in the checkout of this package; None without a checkout or without git."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "pyproject.toml").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
