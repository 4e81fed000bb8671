"""The application, which every module of commands adds its own to; exit codes."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvgen import __version__


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


class Ended(Exception):
    """Raised from what typer would answer itself, without a word: Ctrl-C, and a closed pipe as output."""


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, BrokenPipeError) as error:
            raise Ended from error


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
