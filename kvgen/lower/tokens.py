"""Identity of C++ text by its tokens: comments, white space and line directives change nothing."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from kvgen.digest import DIGEST_CHARS

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
