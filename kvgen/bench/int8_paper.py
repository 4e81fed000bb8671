"""What the INT8 per-channel paper reports (Taneja and Shingvi, December 2025; Tesla T4, 2 x Xeon Gold 6148), as far as its text gives
numbers: most are in pictures.
"""

from __future__ import annotations

SHAPES: tuple[tuple[str, int, int], ...] = (
    ("small", 2048, 128),
    ("medium", 16384, 256),
    ("large", 65536, 256),
    ("very large", 131072, 256),
    ("realistic small", 131072, 1024),
    ("realistic medium", 131072, 2048),
    ("realistic large", 131072, 4096),
    ("realistic very large", 131072, 8192),
)
"""Name, tokens and channels (table 3)."""
CPU_SECONDS = {"131072x8192": 79.0}
"""One thread of plain C (section 7.1). The text does not say which calls the times hold."""
SPEEDUP = {"131072x8192": 1694.0}
"""The vectorized kernel over the CPU (section 7.1): 79 s / 1694 is 46.6 ms."""
REALISTIC_MS = (6.0, 58.0)
"""All kernels, over the four realistic shapes (section 7.1)."""
MAX_ABS_ERROR = 0.00394
"""At every shape (section 7.2)."""
ATTENTION_ERROR = {"131072x8192": 0.095}
"""Mean error of a dot product (section 7.3)."""


def vectorized_ms(shape: str) -> float | None:
    """Time of the vectorized kernel in ms that follows from CPU_SECONDS and SPEEDUP; None where the text has none."""
    return 1e3 * CPU_SECONDS[shape] / SPEEDUP[shape] if shape in SPEEDUP else None
