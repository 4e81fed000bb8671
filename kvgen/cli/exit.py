"""Exit codes of every command, and which one an error means."""

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
    """No kernel answers, or what is needed to make one is missing."""
    INTERRUPTED = 130


def exit_code(error: BaseException) -> Exit:
    """The code that tells a caller what kind of failure this is."""
    if isinstance(error, KeyboardInterrupt):
        return Exit.INTERRUPTED
    if isinstance(error, errors.SpecError):
        return Exit.USAGE
    if isinstance(error, errors.CheckError):
        return Exit.REGRESSION
    return Exit.NO_KERNEL
