"""The Jinja environment that every back end renders with, and the headers that a rendered source reaches."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from kvgen._resources import templates
from kvgen.errors import KvgenError

_STATEMENT = re.compile(r"^\s*(\{%.*%\}|\{\{.*\}\})\s*$")
"""A line that renders to any number of lines: a statement, or a text of the context alone."""
_LINE = re.compile(r'^#line (\d+) "')
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


class _LineDirectives(jinja2.BaseLoader):
    """Puts `#line` before the first line and after lines that render to any number of lines, so that compilers name the template's line."""

    def __init__(self, root: Path) -> None:
        self.files = jinja2.FileSystemLoader(root)

    def get_source(self, environment: jinja2.Environment, template: str) -> tuple[str, str, Any]:
        text, path, fresh = self.files.get_source(environment, template)
        return (text if template.endswith(".py.jinja") else with_lines(text, template)), path, fresh


def with_lines(text: str, name: str) -> str:
    """Template text with `#line` directives for `name`."""
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate(text.splitlines(), 1):
        lines.append(line)
        if _STATEMENT.match(line):
            lines.append(f'#line {number + 1} "{name}"')
    return "\n".join(lines) + "\n"


def without_idle_lines(text: str) -> str:
    """Rendered text without redundant `#line` directives."""
    kept: list[str] = []
    pending: tuple[int, str] | None = None
    line = 0
    for entry in text.splitlines():
        if match := _LINE.match(entry):
            pending = int(match[1]), entry
            continue
        if pending is not None and pending[0] != line:
            line = pending[0]
            kept.append(pending[1])
        pending = None
        kept.append(entry)
        line += 1
    return "\n".join(kept) + "\n"


@cache
def environment(root: Path) -> jinja2.Environment:
    """The environment over the templates of a root folder."""
    made = jinja2.Environment(
        loader=_LineDirectives(root),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    made.globals["cpp"] = cpp_literal
    return made


def cpp_literal(value: bool | int | float) -> str:
    """A Python scalar as a C++ literal."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{float(value)!r}f" if isinstance(value, float) else str(value)


def render(name: str, **context: Any) -> str:
    """The template `name` (a path below `templates/`) rendered. Raises KvgenError if it is missing or uses an undefined name."""
    try:
        return without_idle_lines(environment(templates()).get_template(name).render(**context))
    except jinja2.TemplateError as error:
        raise KvgenError(f"template {name}: {type(error).__name__}: {error}") from error


def reached_headers(text: str, folders: Iterable[Path]) -> tuple[Path, ...]:
    """The files among `folders` that a source includes, directly or not, sorted by path."""
    roots = tuple(folders)
    found: dict[str, Path] = {}
    pending = _INCLUDE.findall(text)
    while pending:
        name = pending.pop()
        path = None if name in found else next((root / name for root in roots if (root / name).is_file()), None)
        if path is None:
            continue
        found[name] = path
        pending += _INCLUDE.findall(path.read_text(encoding="utf-8"))
    return tuple(sorted(found.values()))
