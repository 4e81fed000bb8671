"""Rendered C++: the Jinja environment of every back end, the headers that a source reaches, and the identity of text by its tokens, which
comments, white space and line directives do not change.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from kvgen._resources import templates
from kvgen.digest import DIGEST_CHARS
from kvgen.errors import KvgenError

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_TOKEN = re.compile(
    r"""
    (?P<skip> [ \t\r\f\v]+ | \\\r?\n | //(?:\\\n|[^\n])* | /\*.*?\*/ | ^[ \t]*\#[ \t]*line\b[^\n]* )
  | (?P<newline> \n )
  | (?P<define> \#[ \t]*define[ \t]+\w+\(? )                          # F(x) and F (x) are other macros
  | (?:u8|[uUL])?R"(?P<mark>[^()\\\s]*)\(.*?\)(?P=mark)"
  | (?:u8|[uUL])?"(?:\\.|[^"\\\n])*" | (?:u8|[uUL])?'(?:\\.|[^'\\\n])*'
  | \.?\d(?:[eEpP][+-]|'?[\w.])* | \w+
  | <<=|>>=|<=>|->\*|\.\.\.|::|\#\#|->|\+\+|--|<<|>>|&&|\|\||\.\*|[-+*/%^&|=!<>]= | .
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)


def render(name: str, **context: Any) -> str:
    """The template `name` (a path below `templates/`) rendered. Raises KvgenError if it is missing or uses an undefined name."""
    from jinja2 import TemplateError

    try:
        return str(_environment(templates()).get_template(name).render(**context))
    except TemplateError as error:
        raise KvgenError(f"template {name}: {type(error).__name__}: {error}") from error


@cache
def _environment(root: Path) -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(root), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    made.globals["cpp"] = _cpp_literal
    return made


def _cpp_literal(value: bool | int | float) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{float(value)!r}f" if isinstance(value, float) else str(value)


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


def tokens(text: str) -> list[str]:
    """Tokens of C++, with a newline after each preprocessor directive."""
    listed: list[str] = []
    first, directive = True, False  # on its line; within a directive
    for found in _TOKEN.finditer(text):
        if found.lastgroup == "skip":
            continue
        if found.lastgroup == "newline":
            if directive:
                listed.append("\n")
            first, directive = True, False
            continue
        token = found[0]
        directive |= first and token[0] == "#"
        first = False
        listed.append("".join(token.split()) if found.lastgroup == "define" else token)
    return listed


def tokens_digest(text: str) -> str:
    """Digest of the tokens of C++ text."""
    return hashlib.sha256("\0".join(tokens(text)).encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST_CHARS]


def headers_digest(headers: Iterable[Path]) -> str:
    """Digest of the names and tokens of headers. Raises OSError, and ValueError for a file that is not UTF-8."""
    sha = hashlib.sha256()
    for header in sorted(headers, key=lambda path: path.name):
        facts = header.stat()
        sha.update(f"{header.name} {_of_file(header, facts.st_size, facts.st_mtime_ns)}\n".encode())
    return sha.hexdigest()[:DIGEST_CHARS]


@lru_cache(maxsize=256)
def _of_file(header: Path, *_facts: int) -> str:
    return tokens_digest(header.read_text(encoding="utf-8"))
