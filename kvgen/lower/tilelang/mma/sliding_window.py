"""Sliding window attention: a query sees itself and the `tokens` - 1 tokens before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SlidingWindow:
    """A mask (`mask.py`)."""

    tokens: int
    windowed = True

    def first_token(self, limit: Any) -> Any:
        """Position of the oldest token in the window; negative where the sequence is shorter."""
        return limit - self.tokens
