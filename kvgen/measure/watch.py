"""Judges readings of a worker's resident memory: whether a candidate, or the process as a whole, uses too much."""

from __future__ import annotations

from collections.abc import Mapping

NEARLY = 0.8
"""Fraction of the limit. A process that died beyond it probably ignored a failed allocation."""


class Watch:
    """Readings of the resident memory of one process.

    While a candidate's code runs, the growth of the process since then counts as the candidate's, in addition to memory that its
    earlier calls kept. At other times kvgen fills its own buffers: then only `ceiling` applies, to the growth since the process was ready.
    """

    def __init__(self, limit: int, ceiling: int) -> None:
        """`limit` for a candidate, `ceiling` for the process, both in bytes."""
        self.limit = limit
        self.ceiling = max(limit, ceiling)
        self.base: int | None = None
        """Resident bytes of the process when it was ready. Readings before that do not count."""
        self.renew()

    def renew(self) -> None:
        """Begin the next request: forget the readings of the last one."""
        self._peak = 0
        self._whole = 0
        self._stretch: Mapping[str, int] | None = None

    def tell(self, stretch: Mapping[str, int] | None) -> None:
        """Note that a candidate's code begins to run (`kvgen.measure.allowance.Stretch`), or ends (None)."""
        self._stretch = stretch

    def count(self, resident: int) -> None:
        """Count a reading."""
        if self.base is None:
            return
        self._whole = max(self._whole, resident - self.base)
        if self._stretch is not None:
            self._peak = max(self._peak, self.limit - self._stretch["left"] + resident - self._stretch["resident"])

    def exceeds(self, resident: int) -> bool:
        """Whether a reading exceeds a limit."""
        if self.base is None:
            return False
        own = self._stretch is not None and resident - self._stretch["resident"] > self._stretch["left"]
        return own or resident - self.base > self.ceiling

    @property
    def over(self) -> bool:
        """Whether a counted reading exceeded a limit."""
        return self._peak > self.limit or self._whole > self.ceiling

    @property
    def verdict(self) -> str | None:
        """The limit that was reached (or nearly, by a process that died), as a sentence; None if memory was not the reason."""
        if self._peak > NEARLY * self.limit:
            return f"it used up {self.limit >> 20} MiB of host memory"
        if self._whole > self.ceiling:
            return f"its process used up all {self.ceiling >> 20} MiB of host memory that were free"
        return None
