"""benchmarks/header_changes.py: patches reach a copy of the headers only, and cases take what a change's name says."""

from __future__ import annotations

import difflib
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import header_changes
from benchmarks.header_changes import Case, Outcome, colds, patched, timed
from kvgen import _resources
from kvgen.spec import Workload
from kvgen.spec.timing import Timing

HEADER = "templates/cpu/include/kvgen/attend.hpp"


def patch(file: Path, word: str) -> str:
    """A file with a patch that adds a comment to a header; also one of a file that no copy has."""
    text = (_resources.root() / HEADER).read_text().splitlines(keepends=True)
    lines = difflib.unified_diff(text, [f"// {word}\n", *text], f"a/{HEADER}", f"b/{HEADER}")
    file.write_text("".join(lines) + "--- a/tests/some.py\n+++ b/tests/some.py\n@@ -1 +1 @@\n-one\n+two\n")
    return str(file)


def test_patches_change_a_copy_also_inside_a_repository(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    before = (_resources.root() / HEADER).read_text()
    folder = patched(tmp_path / "copy", [patch(tmp_path / "one.patch", "changed")])
    assert (folder / HEADER).read_text() == "// changed\n" + before
    assert (_resources.root() / HEADER).read_text() == before


def test_a_patch_that_does_not_apply_and_a_missing_one_are_named(tmp_path: Path) -> None:
    one = patch(tmp_path / "one.patch", "changed")
    Path(one).write_text(Path(one).read_text().replace("\n ", "\n other "))
    with pytest.raises(ValueError, match=r"one.patch does not apply: .*attend.hpp"):
        patched(tmp_path / "copy", [one])
    with pytest.raises(FileNotFoundError, match="nowhere"):
        patched(tmp_path / "other", [str(tmp_path / "nowhere")])


def test_a_change_of_that_name_takes_its_cases_without_exact_q() -> None:
    case = Case.of("k4v4 w8u1d2 8x1024,2x512", "sm90")
    assert case.under("4") is case
    assert (case.schedule.launch["exact_q"], case.under("4.noexact").schedule.launch["exact_q"]) == (True, False)
    assert case.under("4.noexact").schedule.layout == case.schedule.layout


def test_a_ratio_is_the_median_over_rounds_and_needs_both_times() -> None:
    work = Workload(batch=1, kv_len=512)
    base, mine = (Outcome("ok", timings=(Timing(work, us[1], us, 5.0),)) for us in ((10.0, 20.0, 40.0), (11.0, 20.0, 20.0)))
    unknown = {"watts": "", "clock_mhz": ""}
    assert timed(mine, base) == {"us": 20.0, "ratio": 1.0, "read_fraction": 0.25, "note": "", **unknown}
    assert timed(mine, Outcome("crash", "it died"))["ratio"] == ""
    assert timed(Outcome("crash", "it died"), base) == {"us": "", "ratio": "", "read_fraction": "", "note": "it died", **unknown}


def test_power_and_clock_under_load_are_in_the_row_and_either_may_be_unknown() -> None:
    work = Workload(batch=1, kv_len=512, load="sustained")
    loaded = Outcome("ok", timings=(Timing(work, 10.0, (10.0,), 5.0, watts=512.5, clock_mhz=1755.0),))
    row = timed(loaded, loaded)
    assert (row["watts"], row["clock_mhz"], row["ratio"]) == (512.5, 1755.0, 1.0)
    only_power = timed(Outcome("ok", timings=(Timing(work, 10.0, (10.0,), 5.0, watts=512.5),)), loaded)
    assert (only_power["watts"], only_power["clock_mhz"]) == (512.5, "")
    assert list(only_power) == list(row) == list(timed(Outcome("crash", "it died"), loaded))


def test_bytes_of_inputs_are_given_in_mib_or_left_to_builds() -> None:
    assert colds("180,1440") == [180 << 20, 1440 << 20]
    assert colds("") == [None]


@pytest.mark.parametrize(
    "words",
    [
        ["--change", "patch"],
        ["--change", "as it is=patch"],
        ["--case", "k4v4"],
        ["--case", "k4v4 w8x 1x128"],
        ["--cold", "180,"],
        ["--cold", "0"],
    ],
)
def test_wrong_words_are_usage_errors(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["header_changes.py", "--arch", "cpu", *words])
    with pytest.raises(SystemExit) as ended:
        header_changes.main()
    assert ended.value.code == 2
