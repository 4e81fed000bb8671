from __future__ import annotations

from collections import Counter

import pytest

from kvgen.cli.live import ProgressView, line, table
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


def test_the_table_shows_speed_up_over_the_default():
    from rich.console import Console

    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table("tiny", SEEN))
    text = console.export_text()
    assert "1.25x" in text
    assert "cpu[block=64]" in text


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
