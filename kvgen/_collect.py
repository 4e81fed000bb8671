"""Keeps the garbage collector from running because of imports: with torch loaded, one collection takes as long as the imports."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def resting() -> Iterator[None]:
    """Disable garbage collection within the block, and count its objects as old afterwards.

    What imports allocate is hardly ever garbage, but it counts towards the next collection, which would begin as soon as collection is
    enabled again. Freezing and unfreezing moves all objects to the oldest generation and sets the counts to 0, in constant time. In a
    program that keeps objects frozen itself they stay so, and the collection takes place.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
