"""The progress of a build on stderr: a live table on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from kvgen.cli.output import microseconds

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

    from kvgen.tune.progress import Progress

LINE_SECONDS = 5.0
NOTE_CHARS = 110
BAR_CHARS = 60


class ProgressView:
    """Shows `Progress` snapshots while it is open; `quiet` shows none."""

    def __init__(self, title: str, *, quiet: bool = False) -> None:
        self.title = title
        self.quiet = quiet
        self._live: Live | None = None
        self._said = (-LINE_SECONDS, "", 0.0)

    def __enter__(self) -> ProgressView:
        if not self.quiet and sys.stderr.isatty():
            from rich.live import Live

            self._live = Live(console=_console(), refresh_per_second=4, transient=True)
            self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def __call__(self, progress: Progress) -> None:
        """Take a snapshot."""
        if self._live is not None:
            self._live.update(table(self.title, progress))
        elif not self.quiet:
            self._line(progress)

    def _line(self, progress: Progress) -> None:
        """A line when something is new, but not more often than every few seconds."""
        total = sum(best.us for best in progress.best.values())
        then, phase, best = self._said
        now = time.monotonic()
        if phase == progress.phase and now - then < LINE_SECONDS:
            return
        if progress.phase == "compiling" and phase == "measuring" and total == best and now - then < LINE_SECONDS:
            return
        self._said = (now, progress.phase, total)
        with suppress(OSError):  # a build does not end because nobody can read how far it is
            print(line(self.title, progress), file=sys.stderr, flush=True)


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def line(title: str, progress: Progress) -> str:
    """One line: where the run is."""
    best = ", ".join(f"{key} {microseconds(one.us)}" for key, one in sorted(progress.best.items()))
    return f"{title}: {status(progress)}" + (f"; best {best}" if best else "")


def status(progress: Progress) -> str:
    """Phase, trials, failures and time."""
    planned = f" of {progress.planned}" if progress.planned is not None else ""
    parts = [progress.phase, f"{progress.done}{planned} measured"]
    if progress.known:
        parts.append(f"{progress.known} known")
    if progress.failures:
        parts.append("failed: " + ", ".join(f"{count} {kind}" for kind, count in sorted(progress.failures.items())))
    parts.append(f"{progress.elapsed:.0f} s")
    if progress.left is not None:
        parts.append(f"{progress.left:.0f} s left")
    return ", ".join(parts)


def spent(progress: Progress) -> float | None:
    """Fraction of the budget that is used up: of its seconds or its measurements, whichever end first. None without a bound."""
    fractions = []
    if progress.left is not None:
        fractions.append(progress.elapsed / max(progress.elapsed + progress.left, 1e-9))
    if progress.planned:
        fractions.append(progress.done / progress.planned)
    return min(1.0, max(fractions)) if fractions else None


def table(title: str, progress: Progress) -> RenderableType:
    """How much of the budget is spent, and the best of every workload so far."""
    from rich.console import Group
    from rich.markup import escape
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    rows = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("workload", "best", "default", "speed-up"):
        rows.add_column(name, justify="left" if name == "workload" else "right")
    rows.add_column("schedule", overflow="ellipsis", no_wrap=True)
    for key, best in sorted(progress.best.items()):
        faster = f"{best.default_us / best.us:.2f}x" if best.default_us else "–"
        rows.add_row(key, microseconds(best.us), microseconds(best.default_us), faster, escape(best.schedule))
    note = Text(progress.note[:NOTE_CHARS], style="dim", no_wrap=True, overflow="ellipsis")
    fraction = spent(progress)
    bar = [] if fraction is None else [ProgressBar(total=1.0, completed=fraction, width=BAR_CHARS)]
    return Group(Text(f"{title}: {status(progress)}", style="bold"), *bar, rows, note)
