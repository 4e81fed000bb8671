"""Limits of a spec's size, so that a damaged or hostile spec is refused in little time and memory."""

from __future__ import annotations

from typing import Any

from kvgen.errors import SpecIssue

MAX_TEXT = 1 << 16
"""Bytes of a file or a YAML text, and characters of all texts in a spec, a text that aliases repeat counted every time."""
MAX_VALUES = 8192
"""Field names, values, lists and mappings together; aliases count as often as they are used. 256 full workloads are 4864."""
MAX_DEPTH = 32
"""Mappings and lists inside each other."""
MAX_NUMBER = 64
"""Characters of a number in YAML, digits of an integer in Python."""

_LARGEST_INTEGER = 10**MAX_NUMBER

Place = tuple[str | int, ...]


class _Unreadable:
    """Marks a value that was refused, so that no further issue is reported for it."""

    def __repr__(self) -> str:
        return "unreadable"

    def __deepcopy__(self, memo: object) -> _Unreadable:
        return self  # it is told by its identity


UNREADABLE = _Unreadable()


class TooLarge(Exception):
    """The spec exceeds a limit (`issue`); reading stops."""

    def __init__(self, issue: SpecIssue) -> None:
        self.issue = issue
        super().__init__(str(issue))


class Count:
    """Counts of one spec while it is read."""

    def __init__(self) -> None:
        self.values = 0
        self.characters = 0

    def add(self, depth: int, text: str = "") -> str | None:
        """Count one name or value at a depth, with its text if it is one. Returns the limit that it exceeds, None within all."""
        self.values += 1
        self.characters += len(text)
        if depth > MAX_DEPTH:
            return f"nested too deeply: a spec has at most {MAX_DEPTH} mappings and lists inside each other"
        if self.values > MAX_VALUES:
            return f"too large: a spec has at most {MAX_VALUES} names and values"
        if self.characters > MAX_TEXT:
            return f"too large: the texts of a spec have at most {MAX_TEXT} characters"
        return None


def refusal(value: Any) -> str | None:
    """The reason why no field accepts this text or number; None if one could."""
    if isinstance(value, int) and not -_LARGEST_INTEGER < value < _LARGEST_INTEGER:
        return f"not a readable integer: it has more than {MAX_NUMBER} digits"
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return "not text: half of a surrogate pair stands in it"
    return None
