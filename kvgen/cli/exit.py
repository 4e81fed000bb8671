"""Exit codes of all commands, and the code, the sentence and the JSON of each error."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from kvgen import errors


class Exit(IntEnum):
    """Exit codes of every command."""

    GOOD = 0
    REGRESSION = 1
    USAGE = 2
    """Bad spec or arguments."""
    NO_KERNEL = 3
    """No kernel for the request, or a tool, device or library is missing, or another failure."""
    INTERRUPTED = 130
    UNREAD = 141
    """The reader of the output ended first: what a shell reports of a command that the closed pipe kills."""


def exit_code(error: BaseException) -> Exit:
    """The exit code of an exception."""
    if isinstance(error, KeyboardInterrupt):
        return Exit.INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return Exit.UNREAD
    if isinstance(error, errors.SpecError):
        return Exit.USAGE
    if isinstance(error, errors.CheckError):
        return Exit.REGRESSION
    return Exit.NO_KERNEL


def message_of(error: BaseException) -> str:
    """What a user reads of an exception."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, (errors.KvgenError, OSError)):
        return str(error)
    return f"internal error: {type(error).__name__}: {error} (--debug shows where)"


def error_json(error: BaseException) -> dict[str, Any]:
    """An exception as plain data."""
    return {"error": {"kind": type(error).__name__, "message": message_of(error), "exit": int(exit_code(error))}}
