"""Specs from files, text and mappings, with every mistake at once; and back to YAML."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvgen.errors import SpecError, SpecIssue
from kvgen.spec import rules
from kvgen.spec.issues import LineOf, in_order, no_line, path_text, spec_issues
from kvgen.spec.limits import MAX_TEXT, UNREADABLE
from kvgen.spec.model import KernelSpec
from kvgen.spec.partial import partial_spec
from kvgen.spec.plain import plain
from kvgen.spec.presets import start_from


def load_spec(source: str | Path | Mapping[str, Any] | KernelSpec) -> KernelSpec:
    """The spec in a YAML file, a YAML text or a mapping.

    A string is YAML if it contains a newline or a `:` followed by a space, else the path of a file. Raises SpecError with every
    mistake up to the hundredth, with lines if the source is YAML, and no other exception for any content. A source
    that exceeds `kvgen.spec.limits` is refused.
    """
    if isinstance(source, KernelSpec):
        return source
    if isinstance(source, Mapping):
        return _validate(*plain(source), no_line, None)
    if isinstance(source, str) and ("\n" in source or ": " in source or source.lstrip().startswith(("{", "["))):
        return _load_text(source, None)
    if not isinstance(source, (str, Path)):
        raise SpecError([SpecIssue("", f"a spec is a path, YAML text or a mapping, not {type(source).__name__}")])
    return _load_text(_read(Path(source)), str(source))


def dump_spec(spec: KernelSpec) -> str:
    """YAML with every field; `load_spec` gives the same spec back."""
    import yaml

    return yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=120)


def _read(path: Path) -> str:
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
                raise SpecError([SpecIssue("", "not a file, but a socket or a device")], str(path))
            os.set_blocking(file.fileno(), True)  # a pipe that has a writer is read to its end
            content = file.read(MAX_TEXT + 1) or b""
        if len(content) > MAX_TEXT:
            raise SpecError([SpecIssue("", f"too large: a spec has at most {MAX_TEXT} bytes of text")], str(path))
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError([SpecIssue("", f"the file is not UTF-8 text (byte {error.start})")], str(path)) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SpecError([SpecIssue("", f"cannot read the file: {reason}")], str(path)) from None


def _without_waiting(path: str, flags: int) -> int:
    """Open a file that may be a pipe without a writer: it then reads as empty."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _load_text(text: str, name: str | None) -> KernelSpec:
    from kvgen.spec.document import parse

    document = parse(text)
    if document.data is None:
        raise SpecError(document.issues or [SpecIssue("", "empty: nothing is specified")], name)
    return _validate(document.data, document.issues, document.line_of, name)


def _validate(data: Any, found: list[SpecIssue], line_of: LineOf, name: str | None) -> KernelSpec:
    """The spec, or all of `found` and the mistakes in `data` as one SpecError."""
    issues = list(found)
    if data is UNREADABLE:
        raise SpecError(issues, name)
    if not isinstance(data, dict):
        raise SpecError([*issues, SpecIssue("", "a spec is a mapping of sections (attention, key, value, ...)", line_of(()))], name)
    if "preset" in data:
        line_of = _or_preset_line(line_of, data)
        data, problem = start_from(data)
        if problem:
            issues.append(SpecIssue("preset", problem.message, line_of(("preset",)), problem.hint))
    try:
        spec = KernelSpec.model_validate(data)
    except ValidationError as error:
        issues += spec_issues(error, KernelSpec, line_of)
        readable = partial_spec(data, error)
        issues += [SpecIssue(path_text(place), reason, line_of(place)) for place, reason in rules.problems(readable)]
    if issues:
        raise SpecError(in_order(issues), name)
    return spec


def _or_preset_line(line_of: LineOf, written: dict[str, Any]) -> LineOf:
    """Sections that a preset brought have its line."""
    return lambda place: line_of(place if place and place[0] in written else ("preset",))
