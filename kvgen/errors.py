"""All errors that kvgen raises on purpose. Messages are sentences for users: what is wrong, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


class KvgenError(Exception):
    """Base of all errors raised by kvgen."""


HOST_REASONS = re.compile(
    r"No space left on device|Disk quota exceeded|Read-only file system|Input/output error|Too many open files"
    r"|Cannot allocate memory|virtual memory exhausted|out of memory allocating|Resource temporarily unavailable|MemoryError"
)
"""Messages of a compiler, with LC_ALL=C, or of Python that mean that this machine failed, and not what it compiled."""
MAX_ISSUES = 100
"""Mistakes that a SpecError lists."""
MAX_ISSUE_TEXT = 300
"""Characters of an issue's path, message and hint, each."""


@dataclass(frozen=True, slots=True)
class SpecIssue:
    """One mistake in a spec: where (dotted path), what, the line in the file if known, and a suggestion.

    Path, message and hint are one printable line each, cut where longer than MAX_ISSUE_TEXT, whatever the spec holds.
    """

    path: str
    message: str
    line: int | None = None
    hint: str | None = None

    def __post_init__(self) -> None:
        for name in ("path", "message", "hint"):
            text = getattr(self, name)
            if text is not None:
                object.__setattr__(self, name, _one_line(text))

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line is not None else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{where}{self.path or 'spec'}: {self.message}{hint}"


class SpecError(KvgenError):
    """A spec that cannot be accepted; `issues` lists the mistakes found, not only the first: MAX_ISSUES at most."""

    def __init__(self, issues: list[SpecIssue], source: str | None = None) -> None:
        self.issues = issues[:MAX_ISSUES]
        self.source = source
        head = f"{_one_line(source)}: " if source else ""
        more = len(issues) > MAX_ISSUES
        count = f"more than {MAX_ISSUES} mistakes" if more else "1 mistake" if len(issues) == 1 else f"{len(issues)} mistakes"
        lines = [f"{head}{count} in the spec", *(f"  {issue}" for issue in self.issues)]
        if more:
            lines.append(f"  there are more mistakes: these are the first {MAX_ISSUES}")
        super().__init__("\n".join(lines))


def printable(text: str) -> str:
    """The text on one line, with what is not printable (control characters, line breaks, halves of surrogate pairs) as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _one_line(text: str) -> str:
    """At most MAX_ISSUE_TEXT characters."""
    start = printable(text[: MAX_ISSUE_TEXT + 1])
    return start if len(start) <= MAX_ISSUE_TEXT else start[: MAX_ISSUE_TEXT - 3] + "..."


class UnsupportedError(KvgenError):
    """A back end cannot compute the spec, or another part of kvgen the request. It never computes something else instead."""

    def __init__(self, backend: str, reason: str, *, is_backend: bool = True) -> None:
        self.backend = backend
        self.reason = reason
        super().__init__(f"the {backend} back end does not support this spec: {reason}" if is_backend else f"{backend}: {reason}")


class ToolchainMissing(KvgenError):
    """A compiler, library or device that the request needs is not on this machine."""


class CompileError(KvgenError):
    """A compiler refused generated source; `log` is its output."""

    def __init__(self, message: str, log: str = "") -> None:
        self.log = log
        super().__init__(f"{message}\n{log}" if log else message)


class HostError(KvgenError):
    """This machine failed: its disk, permissions, memory or processes. It is independent of the kernel, and never recorded as
    a kernel's failure. `path` is the file or folder concerned, if there is one.
    """

    def __init__(self, message: str, path: Path | None = None) -> None:
        self.path = path
        super().__init__(message)


class CompilerCrash(HostError):
    """A compiler, or one of its passes, was killed by a signal, for example for lack of memory; the source was not judged."""


@contextmanager
def host_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a HostError: `cannot {doing} {file}: {reason}`; the file is the error's own, else `path`."""
    try:
        yield
    except BrokenPipeError:  # a reader that has seen enough, as `head` does
        raise
    except OSError as error:
        named = error.filename if isinstance(error.filename, str) else None
        place = Path(named) if named else path
        raise HostError(f"cannot {doing} {place}: {error.strerror or error}", place) from error


class CheckError(KvgenError):
    """A kernel ran and its numbers are wrong."""


class MeasureError(KvgenError):
    """A measurement could not be taken."""


class RegistryMiss(KvgenError):
    """There is no kernel for the request; the message lists what was considered, and why it was not used."""


class CacheMismatch(KvgenError):
    """A cache object was packed in another layout, or is too small, for the kernel of the call."""
