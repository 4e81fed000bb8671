"""Converts mappings from Python to plain data, with the same limits as for files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvgen.digest import canonical_json
from kvgen.errors import MAX_ISSUES, SpecIssue
from kvgen.spec.issues import path_text, shown
from kvgen.spec.limits import UNREADABLE, Count, Place, TooLarge, refusal


def plain(data: Mapping[Any, Any]) -> tuple[Any, list[SpecIssue]]:
    """`data` with dicts for mappings and lists for lists and tuples, UNREADABLE where the issues give the reason.

    A list or mapping that contains itself is nested too deeply. Values of other types are kept; the models refuse them.
    """
    reader = _Reader()
    try:
        return reader.read(data, ()), reader.issues
    except TooLarge as error:
        return UNREADABLE, [*reader.issues, error.issue]


def plain_text(data: Any) -> str | None:
    """JSON of plain data that differs for different data, in type or value; None where a value has another type than JSON's."""
    try:
        return canonical_json(data) if _of_json(data) else None
    except ValueError:  # not a finite number
        return None


def _of_json(value: Any) -> bool:
    if type(value) is dict:
        return all(map(_of_json, value.values()))
    return all(map(_of_json, value)) if type(value) is list else value is None or type(value) in (str, int, float, bool)


class _Reader:
    def __init__(self) -> None:
        self.issues: list[SpecIssue] = []
        self.count = Count()

    def read(self, value: Any, place: Place) -> Any:
        self.add(place, value)
        if isinstance(value, Mapping):
            return self.mapping(value, place)
        if isinstance(value, (list, tuple)):
            return [self.read(item, (*place, index)) for index, item in enumerate(value)]
        reason = refusal(value)
        return value if reason is None else self.refuse(place, reason)

    def mapping(self, value: Mapping[Any, Any], place: Place) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for name, item in value.items():
            self.add(place, name)
            if not isinstance(name, str) or refusal(name):
                self.refuse(place, f"field names are plain text, not {shown(name)}")
                continue
            data[name] = self.read(item, (*place, name))
        return data

    def add(self, place: Place, value: Any) -> None:
        reason = self.count.add(len(place), value if isinstance(value, str) else "")
        if reason is not None:
            raise TooLarge(SpecIssue(path_text(place), reason))

    def refuse(self, place: Place, message: str) -> Any:
        """Record an issue and return UNREADABLE. Issues beyond MAX_ISSUES are dropped."""
        if len(self.issues) <= MAX_ISSUES:
            self.issues.append(SpecIssue(path_text(place), message))
        return UNREADABLE
