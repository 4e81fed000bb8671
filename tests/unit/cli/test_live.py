from __future__ import annotations

import errno
import io
from collections import Counter
from dataclasses import replace

import pytest

from kvgen.cli.live import BAR_CHARS, ProgressView, line, spent, table
from kvgen.cli.output import microseconds
from kvgen.tune.progress import Best, Progress

SEEN = Progress(
    "measuring",
    "cpu[block=64 | threads=2]",
    7,
    20,
    3,
    Counter(crash=1, wrong=2),
    {"1x4096": Best(80.0, "cpu[block=64]", 100.0), "1x128": Best(1500.0, "cpu[block=32]", None)},
    12.0,
    30.0,
)


def test_a_line_tells_best_trials_failures_and_time():
    assert line("tiny", SEEN) == (
        "tiny: measuring, 7 of 20 measured, 3 known, failed: 1 crash, 2 wrong, 12 s, 30 s left; best 1x128 1.5 ms, 1x4096 80 µs"
    )


def test_a_line_that_cannot_be_written_ends_no_build(monkeypatch: pytest.MonkeyPatch):
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, text)

    monkeypatch.setattr("sys.stderr", Full())
    with ProgressView("tiny") as view:
        view(SEEN)


def test_the_table_shows_speed_up_over_the_default():
    from rich.console import Console

    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table("tiny", SEEN))
    text = console.export_text()
    assert "1.25x" in text
    assert "cpu[block=64]" in text


@pytest.mark.parametrize(
    ("done", "planned", "left", "fraction"),
    [
        (7, 20, 30.0, 7 / 20),  # 12 s of 42: fewer than 7 of 20
        (1, 20, 12.0, 1 / 2),
        (7, None, 36.0, 1 / 4),
        (7, 14, None, 1 / 2),
        (9, 8, None, 1.0),  # the default is measured whatever the bound is
        (7, None, None, None),
    ],
)
def test_a_bar_shows_how_much_of_the_budget_is_spent(done: int, planned: int | None, left: float | None, fraction: float | None):
    from rich.console import Console

    progress = replace(SEEN, done=done, planned=planned, left=left)
    assert spent(progress) == fraction
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table("tiny", progress))
    assert console.export_text().count("━") == BAR_CHARS * (fraction or 0)


def test_plain_output_is_lines_and_quiet_is_nothing(capsys: pytest.CaptureFixture[str]):
    with ProgressView("tiny") as view:
        view(SEEN)
        view(SEEN)
    assert capsys.readouterr().err.count("\n") == 1
    with ProgressView("tiny", quiet=True) as view:
        view(SEEN)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("value", "text"), [(None, "–"), (1.234, "1.23 µs"), (999.0, "999 µs"), (12345.0, "12.3 ms")])
def test_times_read_well(value: float | None, text: str):
    assert microseconds(value) == text
