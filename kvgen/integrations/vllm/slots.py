"""Residuals of requests, for a model runner that gives them no numbers."""

from __future__ import annotations

from collections.abc import Container, Sequence

from kvgen.errors import KvgenError


class RequestSlots:
    """A slot for each request from its first step to its last.

    The runner knows which requests are alive, but not which of them were preempted. Where all slots are taken, the request that has
    waited longest gives its own away: one that was preempted begins again at a whole page, with an empty residual. One that goes on
    within a page and has lost its slot is an error.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._of: dict[str, int] = {}  # in the order of their last steps

    def of(self, ids: Sequence[str], alive: Container[str], computed: Sequence[int], page: int) -> list[int]:
        """The slots of a step's requests, which have `computed` tokens before it. Raises KvgenError where a residual is gone."""
        for gone in [name for name in self._of if name not in alive]:
            self._free.append(self._of.pop(gone))
        for name, tokens in zip(ids, computed, strict=False):
            slot = self._of.pop(name, None)
            if slot is None and tokens % page:
                raise KvgenError(f"request {name} goes on at {tokens} tokens, and its unquantized tokens are gone: restart it")
            self._of[name] = self._take(ids) if slot is None else slot
        return [self._of[name] for name in ids]

    def _take(self, ids: Sequence[str]) -> int:
        if self._free:
            return self._free.pop()
        oldest = next(name for name in self._of if name not in ids)
        return self._of.pop(oldest)
