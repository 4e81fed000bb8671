"""Every error kvgen raises on purpose; each message is meant for the person who reads it."""

from __future__ import annotations

from dataclasses import dataclass


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


class CheckError(KvgenError):
    """A kernel ran and its numbers are wrong."""


class MeasureError(KvgenError):
    """A measurement could not be taken."""


class RegistryMiss(KvgenError):
    """No registered kernel answers the request; the message says what was looked at and why it was passed over."""


class CacheMismatch(KvgenError):
    """A cache object was packed in another layout, or is too small, for the kernel that was asked to read it."""
