"""`kvgen build`: options, progress, errors, places that cannot be written."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvgen.cli import output
from kvgen.cli.build import shown
from kvgen.errors import HostError
from kvgen.spec import KernelSpec
from kvgen.tune.budget import Progress


@pytest.mark.parametrize(("words", "built"), [((), "tuner.tune"), (("--compile-only",), "compile_only.compile_space")])
@pytest.mark.parametrize(
    ("error", "code", "said"), [(HostError("no space is left"), 3, "no space is left"), (KeyboardInterrupt(), 130, "interrupted")]
)
def test_a_spec_that_fails_ends_the_build_with_its_error(
    kvgen: Any, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], built: str, error: BaseException, code: int, said: str
):
    def build(spec: KernelSpec, **_: object) -> None:
        raise error

    monkeypatch.setattr(f"kvgen.tune.{built}", build)
    answer = kvgen("build", "tiny.yaml", "--json", *words)
    assert (answer.code, answer.err) == (code, f"kvgen: {said}\n")
    assert answer.json() == {"error": {"kind": type(error).__name__, "message": said, "exit": code}}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--jobs", 2), 2, "--compile-only"),
        (("--compile-only", "--trials", 4), 2, "--compile-only"),
        (("--compile-only", "--fresh"), 2, "--compile-only"),
        (("--devices", "0,1"), 2, "--devices names GPUs, and this build is for cpu"),
        (("--devices", "all"), 2, "--devices names GPUs, and this build is for cpu"),
        (("--backend", "cpu", "--arch", "sm90"), 3, "cpu back end does not support this spec: it does not target sm90"),
    ],
)
def test_options_without_effect_are_refused(kvgen: Any, words: tuple[object, ...], code: int, said: str):
    answer = kvgen("build", "tiny.yaml", *words)
    assert answer.code == code
    assert said in answer.said


def test_places_that_cannot_be_written_are_named_before_anything_is_measured(kvgen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    for variable, *words in (("REGISTRY",), ("CACHE",), ("CACHE", "--compile-only")):
        with monkeypatch.context() as patch:
            patch.setenv(f"KVGEN_{variable}_DIR", str(tmp_path / "file" / "x"))
            answer = kvgen("build", "tiny.yaml", *words)
            assert answer.code == 3
            assert f"{tmp_path}/file/x" in answer.err
            assert answer.err.rstrip().endswith("Not a directory")
            assert "measur" not in answer.err


def test_progress_has_a_clock_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while nothing happens; with --json there is none."""
    monkeypatch.setattr(output, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(output, "LINE_SECONDS", 0.01)
    for quiet in (True, False):
        told, seconds = list[str](), map(float, range(10**6))
        monkeypatch.setattr(output, "time", SimpleNamespace(monotonic=seconds.__next__))  # a second for each line
        monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=told.append, flush=list, isatty=bool))
        with output.Ticker(quiet=quiet) as ticker:
            shown("tiny", ticker)(Progress("compiling", "", 3, 10, 0, Counter(), {}, 40.0, 20.0))
            while len(told) < 3 and not quiet:
                time.sleep(0.01)
        assert not (quiet and told)
    times = ["41 s, 19 s left", "42 s, 18 s left", "43 s, 17 s left"]
    assert told[:3] == [f"tiny: compiling, 3 of 10 measured, {one}\n" for one in times]
