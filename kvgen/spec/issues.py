"""From pydantic's errors to SpecIssues: a path, one clear clause, a suggestion, and a line if the source is YAML."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from kvgen.errors import MAX_ISSUES, SpecIssue
from kvgen.spec.model import KernelSpec, Model
from kvgen.spec.rules import KIND, Place

if TYPE_CHECKING:
    from pydantic import ValidationError

LONGEST_VALUE = 40
LARGEST_SHOWN = 1024
"""Bits of an integer that is written out."""
_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "dataclass_type": "a mapping",
    "tuple_type": "a list",
    "finite_number": "a finite number",
    "int_parsing_size": "a smaller number",
}


def spec_issues(error: ValidationError, model: type[Model], line_of: Callable[[Place], int | None] = lambda _: None) -> list[SpecIssue]:
    """One issue per mistake, in the order of the lines. `line_of` finds the line of a path."""
    errors = error.errors(include_url=False)
    nested = {e["loc"][: depth + 1] for e in errors for depth in range(len(e["loc"]) - 1)}
    told = [e for e in errors if not (e["type"] == "too_short" and e["loc"] in nested)]  # a list is short because its items are wrong
    told.sort(key=lambda e: line_of(e["loc"]) or 0)
    issues = [_issue(dict(e), model, line_of(e["loc"])) for e in told[: MAX_ISSUES + 1]]  # one more says that there are more
    return list(dict.fromkeys(issues))


def path_text(place: Place) -> str:
    """Dotted path: workloads[0].batch."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def shown(value: object) -> str:
    """A value for a message: short, with its type where the text alone would be ambiguous."""
    if value is None:
        return "nothing"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, dict):
        return "a mapping"
    if not isinstance(value, (bool, int, float, str, bytes)):
        return f"an object of type {type(value).__name__}"
    if isinstance(value, int) and value.bit_length() > LARGEST_SHOWN:  # Python may refuse to print it
        return "a huge number"
    text = repr(value[:LONGEST_VALUE] if isinstance(value, (str, bytes)) else value)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def closest(text: str, choices: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The choice that is spelt most like the text; None if none is."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(text.lower(), choices, n=1, cutoff=cutoff)), None)


def _issue(error: dict[str, Any], model: type[Model], line: int | None) -> SpecIssue:
    place, value, kind = error["loc"], error["input"], error["type"]
    hint = None
    if kind == "unexpected_keyword_argument":
        message, hint = "unknown field", _field_hint(place, model)
    elif kind == "missing":
        message = "required, but missing"
    elif kind == "literal_error":
        choices = [choice.strip("'") for choice in re.split(", | or ", error["ctx"]["expected"])]
        close = closest(shown(value).strip("'"), choices)
        message = f"must be {'one of ' if len(choices) > 1 else ''}{', '.join(choices)}, not {shown(value)}"
        hint = f"did you mean {close}?" if close else None
    elif kind in _EXPECTED:
        message = f"must be {_EXPECTED[kind]}, not {shown(value)}"
        if kind in ("int_type", "float_type") and isinstance(value, str) and re.fullmatch(r"[-+]?[0-9.]+", value):
            zeros = " and without leading zeros" if value.lstrip("+-").startswith("0") else ""
            hint = f"write it without quotes{zeros}"
    elif kind == "string_pattern_mismatch":
        message = f"may hold letters, digits, dots, dashes and underscores, and begins with a letter or a digit, not {shown(value)}"
    elif kind == "too_short":
        message = "must not be empty: leave it out for the default"
    elif kind in (KIND, "too_many", "lengths", "rotation"):
        message = error["msg"]
    else:
        said = error["msg"].replace("Input should", "must")
        message = f"{said[:1].lower()}{said[1:]}, not {shown(value)}"
    return SpecIssue(path_text(place), message, line, hint)


def _field_hint(place: Place, model: type[Model]) -> str | None:
    """The nearest field of the same section, else the section that has a field of this name."""
    owner, name = _model_at(place[:-1], model), str(place[-1])
    if owner is None:
        return None
    if name == "preset" and owner is KernelSpec:
        return "load_spec({'preset': ..., 'attention': {...}}) resolves it"
    known = [one.name for one in fields(owner)]  # type: ignore[arg-type]
    close = closest(name, known, 0.6)
    if close:
        return f"did you mean {close}?"
    for section, inner in get_type_hints(model).items():
        if _is_model(inner) and inner is not owner and name in get_type_hints(inner):
            return f"{name} belongs to {section}"
    return f"known fields: {', '.join(known)}"


def _model_at(place: Place, model: type[Model]) -> type[Model] | None:
    """The model that describes a path."""
    current: Any = model
    for part in place:
        if isinstance(part, int):
            current = next(iter(get_args(current)), None)
        else:
            current = get_type_hints(current).get(part) if _is_model(current) else None
    return current if _is_model(current) else None


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Model)
