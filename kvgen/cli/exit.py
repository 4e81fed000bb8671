"""Exit codes of all commands, and the code of each error."""

from __future__ import annotations

from enum import IntEnum

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
