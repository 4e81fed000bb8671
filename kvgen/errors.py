"""Every error kvgen raises on purpose; each message is meant for the person who reads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


class KvgenError(Exception):
    """Base of all errors raised by kvgen."""


@dataclass(frozen=True, slots=True)
class SpecIssue:
    """One mistake in a spec: where (dotted path), what, the line in the file if known, and a suggestion."""

    path: str
    message: str
    line: int | None = None
    hint: str | None = None

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line is not None else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{where}{self.path or 'spec'}: {self.message}{hint}"


class SpecError(KvgenError):
    """A spec that cannot be accepted; `issues` lists every mistake found, not only the first."""

    def __init__(self, issues: list[SpecIssue], source: str | None = None) -> None:
        self.issues = issues
        self.source = source
        head = f"{source}: " if source else ""
        count = "1 mistake" if len(issues) == 1 else f"{len(issues)} mistakes"
        super().__init__(f"{head}{count} in the spec\n" + "\n".join(f"  {issue}" for issue in issues))


class UnsupportedError(KvgenError):
    """A back end was asked for what it cannot do; it never computes something else instead."""

    def __init__(self, backend: str, reason: str) -> None:
        self.backend = backend
        self.reason = reason
        super().__init__(f"the {backend} back end does not support this spec: {reason}")


class ToolchainMissing(KvgenError):
    """A compiler, library or device that the request needs is not on this machine."""


class CompileError(KvgenError):
    """A compiler refused generated source; `log` is what it printed, with template lines."""

    def __init__(self, message: str, log: str = "") -> None:
        self.log = log
        super().__init__(f"{message}\n{log}" if log else message)


class HostError(KvgenError):
    """This machine failed: its disk, permissions, memory or processes. It says nothing about a kernel, and is never recorded as
    if it did. `path` is the file or folder concerned, None where there is none.
    """

    def __init__(self, message: str, path: Path | None = None) -> None:
        self.path = path
        super().__init__(message)


class CompilerCrash(HostError):
    """A compiler, or one of its passes, was ended by a signal, for want of memory say: neither compiled nor refused."""


@contextmanager
def host_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a HostError: `cannot {doing} {file}: {reason}`; the file is the error's own, else `path`."""
    try:
        yield
    except OSError as error:
        named = error.filename if isinstance(error.filename, str) else None
        place = Path(named) if named else path
        raise HostError(f"cannot {doing} {place}: {error.strerror or error}", place) from error


class CheckError(KvgenError):
    """A kernel ran and its numbers are wrong."""


class MeasureError(KvgenError):
    """A measurement could not be taken."""


class RegistryMiss(KvgenError):
    """No registered kernel answers the request; the message says what was looked at and why it was passed over."""


class CacheMismatch(KvgenError):
    """A cache object was packed in another layout, or is too small, for the kernel that was asked to read it."""
