"""Tests that lower with TileLang are skipped where there is none, or one that is too old."""

from __future__ import annotations

import pytest

from kvgen.lower.backend import get_backend


def needs_tilelang() -> None:
    """Skip the test, or the whole module that calls it, with the reason why TileLang does not lower here."""
    reason = get_backend("tilelang").missing()
    if reason is not None:
        pytest.skip(reason, allow_module_level=True)
