"""Provenance of an entry: version, commit, date, duration of the search."""

from __future__ import annotations

import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any


def provenance(*, seed: int | None = None, trials: int | None = None) -> dict[str, Any]:
    """Facts for an entry made now; `commit` and `dirty` are None outside a checkout. `date` is UTC."""
    from kvgen import __version__

    commit = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain", "--untracked-files=no") if commit else None
    return {
        "kvgen": __version__,
        "commit": commit,
        "dirty": bool(status) if status is not None else None,
        "date": datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        "seed": seed,
        "trials": trials,
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
