"""The TileLang back end: programs of TileLang, lowered in a process of their own to CUDA text that needs no TileLang to compile or run."""

from __future__ import annotations

from kvgen.lower.tilelang.backend import TileLangBackend

__all__ = ["backend", "matrix"]


def backend() -> TileLangBackend:
    """The back end; it loads without TileLang, and then says so in `missing`."""
    return TileLangBackend()


def matrix() -> None:
    """No operation on a matrix."""
