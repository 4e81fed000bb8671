"""What the parent makes of a worker's resident memory: whether a candidate, or the process as a whole, takes too much."""

from __future__ import annotations

from collections.abc import Mapping

NEARLY = 0.8
"""Of the limit. A process that died beyond this did not look at an allocation that failed."""


class Watch:
    """Readings of the resident memory of one process.

    While a candidate's code runs, it has what the process grew by since that began, on top of what its earlier calls left. At other
    times kvgen fills its own buffers: then only `ceiling` binds, on what the process grew by since it was ready.
    """

    def __init__(self, limit: int, ceiling: int) -> None:
        """`limit` for a candidate, `ceiling` for the process, both in bytes."""
        self.limit = limit
        self.ceiling = max(limit, ceiling)
        self.base: int | None = None
        """Resident bytes of the process when it was ready; nothing is watched before."""
        self.renew()

    def renew(self) -> None:
        """The next request: nothing of the last one counts."""
        self._peak = 0
        self._whole = 0
        self._stretch: Mapping[str, int] | None = None

    def tell(self, stretch: Mapping[str, int] | None) -> None:
        """A candidate's code begins to run (`kvgen.measure.allowance.Stretch`), or ends (None)."""
        self._stretch = stretch

    def count(self, resident: int) -> None:
        """Count a reading."""
        if self.base is None:
            return
        self._whole = max(self._whole, resident - self.base)
        if self._stretch is not None:
            self._peak = max(self._peak, self.limit - self._stretch["left"] + resident - self._stretch["resident"])

    def exceeds(self, resident: int) -> bool:
        """Whether a reading is beyond what is allowed."""
        if self.base is None:
            return False
        own = self._stretch is not None and resident - self._stretch["resident"] > self._stretch["left"]
        return own or resident - self.base > self.ceiling

    @property
    def over(self) -> bool:
        """Whether a counted reading was beyond what is allowed."""
        return self._peak > self.limit or self._whole > self.ceiling

    @property
    def verdict(self) -> str | None:
        """What was used up, or nearly so by a process that died; None where memory was not why."""
        if self._peak > NEARLY * self.limit:
            return f"it used up {self.limit >> 20} MiB of host memory"
        if self._whole > self.ceiling:
            return f"its process used up all {self.ceiling >> 20} MiB of host memory that were free"
        return None
