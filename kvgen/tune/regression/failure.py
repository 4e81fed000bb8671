"""Classifies an exception during a check: a regression of the entry, or a failure of this machine, whatever the entry is."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from kvgen.errors import CompileError, HostError, MeasureError, ToolchainMissing
from kvgen.tune.regression.finding import Aspect, Finding

BROKEN_COMPILER = ("internal compiler error", "cannot execute")
"""Messages of a compiler that failed for reasons other than the source."""


def failed(aspect: Aspect, error: Exception, otherwise: str) -> Finding:
    """The finding of an exception: `unable` if this machine failed, else `regressed`, introduced by `otherwise`."""
    message = str(error) or type(error).__name__
    if environment(error):
        return Finding(aspect, "unable", message, environment=True)
    return Finding(aspect, "regressed", f"{otherwise}: {message}")


def environment(error: BaseException) -> bool:
    """Whether an exception, or one that it was raised from, is about this machine: its tools, its disk, its processes."""
    return any(_of_machine(one) for one in _chain(error))


def _of_machine(error: BaseException) -> bool:
    if isinstance(error, CompileError):
        return any(sign in str(error) for sign in BROKEN_COMPILER)
    if isinstance(error, OSError):  # an absent file is a part of kvgen that is gone
        return error.errno not in (None, errno.ENOENT, errno.ENOTDIR)
    return isinstance(error, (HostError, ToolchainMissing, MeasureError, MemoryError))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
