"""The command `kvgen`. Every command imports what it works with when it runs, so that `--help` is fast."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import typer

from kvgen import errors
from kvgen.children import kill_all
from kvgen.cli.app import Ended, Exit, app

CODES = {KeyboardInterrupt: Exit.INTERRUPTED, errors.SpecError: Exit.USAGE, errors.CheckError: Exit.REGRESSION}
"""Exit codes of exceptions; NO_KERNEL of all others."""


def commands() -> typer.Typer:
    """The application with all of its commands."""
    from kvgen.cli import build, entries, check, bench, formats, machine, transfer  # noqa: F401, I001 - in the order of `--help`

    return app


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with its code. `--debug`, anywhere, shows tracebacks."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given or bool(os.environ.get("KVGEN_DEBUG"))
    given = [argument for argument in given if argument != "--debug"]
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without µ shows ?, and the command goes on
    warnings.showwarning = lambda message, *_, **__: typer.echo(str(message), err=True)
    for ending in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(ending) is not signal.SIG_IGN:  # as in a shell's background
            signal.signal(ending, _interrupt)
    try:
        commands()(given, prog_name="kvgen")
    except (Exception, KeyboardInterrupt) as raised:
        error = raised.__cause__ if isinstance(raised, Ended) and raised.__cause__ is not None else raised
        if isinstance(error, KeyboardInterrupt):
            kill_all()
        if debug:
            raise
        sys.exit(_report(error, as_json="--json" in given))
    sys.exit(Exit.GOOD)


def _interrupt(*_: object) -> None:
    """Interrupt the command, once: `timeout` sends its signal twice, and the second must not end what the first one began."""
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.SIG_IGN)
    raise KeyboardInterrupt


def _report(error: BaseException, *, as_json: bool) -> Exit:
    """Tell the user of an exception; the exit code for it."""
    if isinstance(error, BrokenPipeError):
        _end_output()
        return Exit.UNREAD
    code = next((code for kind, code in CODES.items() if isinstance(error, kind)), Exit.NO_KERNEL)
    message = f"internal error: {type(error).__name__}: {error} (--debug shows where)"
    if isinstance(error, KeyboardInterrupt | errors.KvgenError | OSError):
        message = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
    if as_json:
        from kvgen.cli.output import print_json

        try:
            print_json({"error": {"kind": type(error).__name__, "message": message, "exit": int(code)}})
            sys.stdout.flush()
        except OSError:  # on a full disk the answer itself may be what failed
            _end_output()
    with suppress(OSError):
        typer.echo(f"kvgen: {message}", err=True)
    return code


def _end_output() -> None:
    """Let what is left to write go nowhere, so that the interpreter does not complain of it when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
