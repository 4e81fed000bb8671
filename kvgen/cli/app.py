"""The application: commands, and the reporting of errors."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from kvgen import __version__
from kvgen.children import kill_all
from kvgen.cli.exit import Exit, error_json, exit_code, message_of
from kvgen.cli.results import Told


class _Ended(Exception):
    """Carries what typer would answer itself, without a word: Ctrl-C, and a closed pipe as output."""


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, BrokenPipeError) as error:
            raise _Ended from error


app = typer.Typer(
    name="kvgen",
    cls=_Commands,
    help="Compile, verify and tune attention kernels over quantized KV caches. With --debug, every command shows tracebacks of errors.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvgen {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Options that come before a command; the one there is acts in its callback."""


@cache
def _register() -> None:
    """Add all commands to the application, once per process."""
    from kvgen.cli import accuracy, archive, bench, build, check, doctor, recommend, registry, report, space, specs

    for module in (build, registry, bench, accuracy, recommend, space, doctor, check, report, archive, specs):
        module.register(app)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with its code. `--debug`, anywhere, shows tracebacks."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given or bool(os.environ.get("KVGEN_DEBUG"))
    given = [argument for argument in given if argument != "--debug"]
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without µ shows ?, and the command goes on
    signal.signal(signal.SIGTERM, _terminated)
    try:
        _register()
        app(given, prog_name="kvgen")
    except (Exception, KeyboardInterrupt) as raised:
        if isinstance(raised, KeyboardInterrupt) or isinstance(raised.__cause__, KeyboardInterrupt):
            kill_all()
        if debug:
            raise
        error = raised.__cause__ if isinstance(raised, (_Ended, Told)) and raised.__cause__ is not None else raised
        if isinstance(error, BrokenPipeError):
            _end_output()
        else:
            _report(error, as_json="--json" in given and not isinstance(raised, Told))
        sys.exit(exit_code(error))
    sys.exit(Exit.GOOD)


def _terminated(*_: object) -> None:
    """End like Ctrl-C. It may come twice, as from `timeout`, and the second must not end what the first one began."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _end_output() -> None:
    """Let what is left to write go nowhere, so that the interpreter does not complain of it when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())


def _report(error: BaseException, *, as_json: bool) -> None:
    if as_json:
        from kvgen.cli.output import print_json

        try:
            print_json(error_json(error))
            sys.stdout.flush()
        except OSError:  # on a full disk the answer itself may be what failed
            _end_output()
    with suppress(OSError):
        typer.echo(f"kvgen: {message_of(error)}", err=True)
