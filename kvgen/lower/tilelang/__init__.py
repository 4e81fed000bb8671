"""The TileLang back end: programs of TileLang, lowered in a process of their own to CUDA text that needs no TileLang to compile or run.

It loads without TileLang, and then says so in `missing`.
"""

from kvgen.lower.tilelang.backend import TileLangBackend as backend  # noqa: N813

__all__ = ["backend", "operations"]

operations: dict[type, object] = {}
"""No other operation than attention."""
