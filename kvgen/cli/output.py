"""How results are printed: JSON, tables, and formats and launches in a few words."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import typer

from kvgen.errors import printable
from kvgen.results import microseconds as microseconds  # tables of commands and pages write a time alike

if TYPE_CHECKING:
    from kvgen.registry.entry import Entry
    from kvgen.spec import AnySpec, QuantSpec

TICK_SECONDS, LINE_SECONDS = 1.0, 5.0
WORD = 16
"""Characters of the longest words that tables do not cut: those of a key."""


class Ticker:
    """Shows on stderr where a run is, with a clock that runs: in a line of a terminal every second, elsewhere a line every few seconds."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._terminal = sys.stderr.isatty()
        self._said: tuple[Callable[[float], str], float] | None = None
        self._ended = threading.Event()
        self._thread = None if quiet else threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Ticker:
        if self._thread:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread:
            self._thread.join()

    def set(self, text: Callable[[float], str]) -> None:
        """Show this; `text` is given the seconds that have passed since."""
        self._said = text, time.monotonic()

    def _run(self) -> None:
        while not self._ended.wait(TICK_SECONDS if self._terminal or not self._said else LINE_SECONDS):
            self._show()
        if self._terminal and self._said:
            self._write("\n")

    def _show(self) -> None:
        if self._said:
            text = printable(self._said[0](time.monotonic() - self._said[1]))
            width = shutil.get_terminal_size().columns
            self._write(f"\r{text[: width - 1]}\x1b[K" if self._terminal else f"{text}\n")

    @staticmethod
    def _write(text: str) -> None:
        with suppress(OSError):  # a run goes on where its progress cannot be shown
            sys.stderr.write(text)
            sys.stderr.flush()


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False, default=str))


def print_line(text: str) -> None:
    """A line on stdout. Control characters in strings of entries, which a terminal would obey, are escapes."""
    typer.echo(printable(text))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = ()) -> None:
    """A table on stdout; columns in `right` are right-aligned."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    align_right = set(right)
    rows = [["\n".join(map(printable, cell.expandtabs().splitlines())) for cell in row] for row in rows]
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    for column, cells in zip(columns, zip(columns, *rows, strict=True), strict=True):
        whole = all(len(cell) <= WORD and " " not in cell for cell in cells)  # a key that is cut cannot be copied
        table.add_column(column, justify="right" if column in align_right else "left", overflow="fold", no_wrap=whole)
    for row in rows:
        table.add_row(*map(escape, row))  # [build] is text, not a style
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    with console.capture() as drawn:
        console.print(table)
    typer.echo(drawn.get(), nl=False)  # rich would end the process with 1 where the output is a closed pipe


def print_launches(title: str, entry: Entry) -> None:
    """A row for each launch of an entry, further launches last: times that were not measured are dashes."""
    from kvgen.spec import MatrixSpec

    columns = ["workload", "back end", "tuned", "default", "speed-up", "pure read", "of read speed", "launch"]
    if isinstance(entry.spec, MatrixSpec):
        columns = [name.replace("pure read", "copy").replace("read", "copy") for name in columns]
    told: list[tuple[str, ...]] = []
    for work, launch in entry.tuned:
        timing = entry.timing(work)
        us, default, read = (timing.us, timing.default_us, timing.read_us) if timing else (None, None, None)
        faster = f"{default / us:.2f}x" if us and default else "–"
        fraction = f"{timing.read_fraction:.0%}" if timing and timing.read_fraction is not None else "–"
        times = (microseconds(us), microseconds(default), faster, microseconds(read), fraction)
        told.append((work.key, launch.backend, *times, str(launch.params)))
    told += [("other calls", launch.backend, *["–"] * 5, str(launch.params)) for launch in entry.launches if not launch.workloads]
    print_table(title, columns, told, right=columns[2:7])


def describe(spec: AnySpec) -> str:
    """A format in a few words."""
    from kvgen.format.codecs import codec_of
    from kvgen.spec import LinearSpec, MatrixSpec

    if isinstance(spec, MatrixSpec):
        return f"{spec.operation} a matrix, {spec.matrix.dtype}, int{spec.matrix.bits} per {spec.matrix.axis} symmetric"
    if isinstance(spec, LinearSpec):
        linear = spec.linear
        group = "a row" if linear.group == "row" else f"/{linear.group}"
        also = {"bias": linear.bias, "SiLU and multiply": linear.epilogue == "silu_mul", "residual": linear.epilogue == "add"}
        code = f"int{linear.bits} {group}{'' if linear.zero else ' symmetric'}"
        return ", ".join([f"linear {linear.n} x {linear.k}", code, linear.dtype, *(text for text, has in also.items() if has)])

    def operand(letter: str, quant: QuantSpec) -> str:
        if not quant.quantized:
            return f"{letter} {spec.attention.dtype}"
        rotated = "" if quant.rotate is None else f" rotated in blocks of {quant.rotate.channels(spec.attention.head_dim)}"
        rotated += " by the caller" if quant.rotate is not None and quant.rotate.applied == "caller" else ""
        if quant.static:
            also = f" per {quant.axis} /{quant.group}" if quant.grouped else ""
            return f"{letter} {codec_of(quant).label}{also} with a scale per {quant.scale}{rotated}"
        return f"{letter} {codec_of(quant).label} per {quant.axis} /{quant.group}{'' if quant.zero else ' symmetric'}{rotated}"

    a, c = spec.attention, spec.cache
    boosted = spec.key.boost
    boost = f" +{boosted.fraction:.1%} in 4 bits ({boosted.select})" if boosted.fraction else ""
    features = {
        f"pages of {c.page}": c.page,
        f"sink {c.sink}": c.sink,
        f"local {c.local}": c.local,
        f"rollback {c.rollback}": c.rollback,
        "quantized on arrival": c.arrival,
        f"window {a.window}": a.window,
        f"soft cap {a.softcap:g}": a.softcap,
        "learned sinks": a.sinks,
        f"{a.q_len} query tokens": a.q_len > 1,
    }
    heads = f"{a.q_heads}/{a.kv_heads} heads of {a.head_dim}, {a.dtype}"
    return ", ".join([operand("K", spec.key) + boost, operand("V", spec.value), heads, *(text for text, has in features.items() if has)])
