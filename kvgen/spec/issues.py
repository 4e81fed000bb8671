"""From pydantic's errors to SpecIssues: a path, one clear clause, a suggestion, and a line if the source is YAML."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, get_args

from kvgen.errors import MAX_ISSUES, SpecError, SpecIssue
from kvgen.spec.base import Model, hints
from kvgen.spec.limits import UNREADABLE
from kvgen.spec.model import KernelSpec

if TYPE_CHECKING:
    from pydantic import ValidationError

Place = Sequence[str | int]
LineOf = Callable[[Place], "int | None"]

RULE = "rule"
"""Type of pydantic's errors for what does not hold between fields that are right by themselves."""
PRESET = ("preset",)
"""The field that `load_spec` resolves: no spec has it."""
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


def no_line(place: Place) -> None:
    """The lines of a source that is not YAML: none."""
    del place


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


def spec_error(error: ValidationError, model: type[Model]) -> SpecError:
    """The SpecError for a model constructed in Python."""
    return SpecError(spec_issues(error, model))


def spec_issues(error: ValidationError, model: type[Model], line_of: LineOf = no_line) -> list[SpecIssue]:
    """One issue per mistake, in the order of the lines. `line_of` finds the line of a path."""
    errors = error.errors(include_url=False)
    preset = any(e["loc"] == PRESET for e in errors)
    nested = {e["loc"][: depth + 1] for e in errors for depth in range(len(e["loc"]) - 1)}
    told = [
        e
        for e in errors
        if e["input"] is not UNREADABLE  # said already
        and not (e["type"] == "too_short" and e["loc"] in nested)  # a list is short because its items are wrong
        and not (preset and e["type"] == "missing" and e["loc"][0] in ("key", "value"))  # the preset has them
    ]
    told.sort(key=lambda e: line_of(e["loc"]) or 0)
    return in_order([_issue(dict(e), model, line_of) for e in told[: MAX_ISSUES + 1]])  # one more says that there are more


def in_order(issues: Sequence[SpecIssue]) -> list[SpecIssue]:
    """Without duplicates, by line."""
    return sorted(dict.fromkeys(issues), key=lambda issue: issue.line or 0)


def _issue(error: dict[str, Any], model: type[Model], line_of: LineOf) -> SpecIssue:
    place: Place = error["loc"]
    value = error["input"]
    kind = error["type"]
    hint = None
    if kind == "unexpected_keyword_argument":
        message, hint = "unknown field", _field_hint(place, model)
    elif kind == "missing":
        message = "required, but missing"
    elif kind == "literal_error":
        message, hint = _choice(place, model, value)
    elif kind in _EXPECTED:
        message = f"must be {_EXPECTED[kind]}, not {shown(value)}"
        if isinstance(value, str) and kind in ("int_type", "float_type") and _numeric(value):
            hint = (
                "write it without quotes" if not value.lstrip("+-").startswith("0") else "write it without quotes and without leading zeros"
            )
    elif kind == "string_pattern_mismatch":
        message = f"may hold letters, digits, dots, dashes and underscores, and begins with a letter or a digit, not {shown(value)}"
    elif kind == "too_short":
        message = "must not be empty: leave it out for the default"
    elif kind in (RULE, "too_many", "lengths"):
        message = error["msg"]
    else:
        message = f"{_lower(error['msg'].replace('Input should', 'must'))}, not {shown(value)}"
    return SpecIssue(path_text(place), message, line_of(place), hint)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _numeric(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _choice(place: Place, model: type[Model], value: object) -> tuple[str, str | None]:
    """Message and did-you-mean for a value outside a fixed set."""
    owner = _model_at(place[:-1], model)
    choices = _literals(hints(owner)[str(place[-1])]) if owner else []
    close = closest(shown(value).strip("'"), [str(c) for c in choices])
    listed = ", ".join(str(c) for c in choices)
    several = len(choices) > 1
    return f"must be {'one of ' if several else ''}{listed}, not {shown(value)}", f"did you mean {close}?" if close else None


def _literals(annotation: Any) -> list[Any]:
    found: list[Any] = []
    for arg in get_args(annotation):
        found.extend(_literals(arg) if get_args(arg) else [arg])
    return found


def _field_hint(place: Place, model: type[Model]) -> str | None:
    """The nearest field of the same section, else the section that has a field of this name."""
    owner = _model_at(place[:-1], model)
    name = str(place[-1])
    if owner is None:
        return None
    if tuple(place) == PRESET and model is KernelSpec:
        return "load_spec({'preset': ..., 'attention': {...}}) resolves it"
    close = closest(name, hints(owner), 0.6)
    if close:
        return f"did you mean {close}?"
    for section, inner in hints(model).items():
        if isinstance(inner, type) and issubclass(inner, Model) and inner is not owner and name in hints(inner):
            return f"{name} belongs to {section}"
    return f"known fields: {', '.join(hints(owner))}"


def _model_at(place: Place, model: type[Model]) -> type[Model] | None:
    """The model that describes a path."""
    current: Any = model
    for part in place:
        if isinstance(part, int):
            current = get_args(current)[0] if get_args(current) else None
        elif isinstance(current, type) and issubclass(current, Model):
            current = hints(current).get(part)
        if current is None:
            return None
    return current if isinstance(current, type) and issubclass(current, Model) else None
