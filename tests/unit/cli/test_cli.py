"""What all commands have in common: help, arguments, errors and exit codes; `kvgen doctor`, `space`, `report`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks.gpu_words import spec_of, workload_of
from kvgen import __version__
from kvgen.cli.options import parse_seconds, parse_shape, parse_workload
from kvgen.registry.store import Store
from tests.support.commands import TINY
from tests.support.entries import put_changed, tuned

COMMANDS = (
    "build", "list", "show", "why", "check", "bench", "presets", "schema", "accuracy", "spec", "recommend",
    "space", "doctor", "report", "export",
)  # fmt: skip


@pytest.mark.parametrize(("option", "said"), [("--help", (*COMMANDS, "--version", "--debug")), ("--version", (f"kvgen {__version__}",))])
def test_help_loads_nothing_heavy(option: str, said: tuple[str, ...]):
    script = (
        "import sys\n"
        "from kvgen.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as ended:\n    assert not ended.code\n"
        "print([m for m in ('torch', 'optuna', 'jinja2', 'tilelang', 'pydantic', 'yaml', 'numpy', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script, option], capture_output=True, text=True, check=True)
    printed, _, heavy = done.stdout.strip().rpartition("\n")
    assert heavy == "[]"
    assert all(word in printed for word in said)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_seconds, "5min", 300), (parse_seconds, "0.5", 0.5), (parse_seconds, "1h", 3600),
        (lambda text: parse_workload(text).key, "8x16k", "8x16384"),
        (lambda text: parse_workload(text).key, "48x1k-24Kq4:sustained", "48x1024-24576q4:sustained"),
        (lambda text: parse_shape(text).key, "128kx1k", "131072x1024"),
        *((parse_seconds, text, None) for text in ("", "5mx", "-1", "1d")),
        *((parse_workload, text, None) for text in ("8x16kb", "8kkx1", "8x1.5k", "x16k", "8x1k2")),
    ],
)  # fmt: skip
def test_numbers_are_read_as_they_are_usually_written(parse: Callable[[str], object], text: str, value: object) -> None:
    if value is not None:
        assert parse(text) == value
        return
    with pytest.raises(typer.BadParameter, match="write|range"):
        parse(text)


def test_a_bad_spec_is_exit_2_with_its_mistakes(kvgen: Any, tmp_path: Path):
    (tmp_path / "bad.yaml").write_text(TINY.replace("bits: 4", "bits: 5").replace("kv_heads: 1", "kv_head: 1"))
    for command in ("build", "why", "space", "bench"):
        answer = kvgen(command, "bad.yaml")
        assert answer.code == 2
        assert "kv_heads" in answer.err
        assert "key.bits" in answer.err
    error = kvgen("build", "bad.yaml", "--json").json()["error"]
    assert (error["kind"], error["exit"]) == ("SpecError", 2)
    assert "key.bits" in error["message"]


@pytest.mark.parametrize(
    "words",
    [
        ("build",),
        ("build", "no-such-preset"),
        ("build", "tiny.yaml", "--budget", "soon"),
        ("build", "tiny.yaml", "--trials", "0"),
        ("build", "tiny.yaml", "--backend", "fortran"),
        ("build", "tiny.yaml", "--arch", "sm12"),
        ("build", "tiny.yaml", "--workload", "big"),
        ("bench", "tiny.yaml", "--against", "nobody"),
        ("bench",),
        ("why", "tiny.yaml", "--workload", "1x99999999999"),
        ("check", "no-such-folder"),
        ("presets", "no-such-preset"),
        ("no-such-command",),
    ],
)
def test_bad_arguments_are_exit_2(kvgen: Any, words: tuple[str, ...]):
    answer = kvgen(*words)
    assert answer.code == 2, answer.err
    assert "Traceback" not in answer.err


def test_a_file_that_cannot_be_written_is_named_before_anything_is_measured(kvgen: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvgen.cli.bench.pin_threads", lambda: pytest.fail("it was measured"))
    answer = kvgen("bench", "tiny.yaml", "--csv", "tiny.yaml/rows.csv")
    assert answer.code == 3
    assert answer.err.startswith("kvgen: cannot write tiny.yaml")


def test_a_command_without_its_packages_names_the_line_to_type(kvgen: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvgen.extras.find_spec", lambda package: None)
    answer = kvgen("report")
    assert answer.code == 3
    assert answer.err == "kvgen: kvgen report needs matplotlib: pip install 'kvgen[report]'\n"


# --- space, doctor ---------------------------------------------------------------------------------------------------


def test_space_counts_and_explains(kvgen: Any):
    (space,) = kvgen("space", "tiny.yaml", "--backend", "cpu", "--schedules", "--json").json()["spaces"]
    assert space["size"] == len(space["schedules"]) > 0
    assert set(space["launches"]) == set(space["defaults"]) == {"1x256"}
    shown = kvgen("space", "tiny.yaml", "--backend", "cpu", "--explain").out
    assert all(part in shown for part in ("cannot be built", "can be built, not searched", "default at 1x256: block="))


def test_doctor_tells_compilers_back_ends_extras_and_places(kvgen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from kvgen import extras

    find = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda package: None if package == "matplotlib" else find(package))
    facts = kvgen("doctor", "--json").json()
    checks = {check["name"]: check for check in facts["checks"]}
    assert {"g++", "nvcc", "GPU", "back end cpu", "back end cuda"} <= set(checks)
    assert checks["kvgen[report]"]["detail"] == "kvgen[report] needs matplotlib: pip install 'kvgen[report]'"
    assert (facts["places"]["cache"], "cpu" in facts["targets"]) == (str(tmp_path / "cache"), True)


# --- report ------------------------------------------------------------------------------------------


def test_damaged_entries_are_named_by_what_leaves_them_out(kvgen: Any, tmp_path: Path):
    entry = tuned(spec_of("k4v4", "sm90", [workload_of("1x4096")]))
    put_changed(Store(tmp_path / "registry"), entry, lambda data: data.update(schema=2))
    report = kvgen("report", "-o", "x.html")
    assert report.code == 0
    assert entry.key not in (tmp_path / "x.html").read_text()
    assert entry.key in report.err
    assert "schema 2, and this kvgen reads" in report.err
    answer = kvgen("show", entry.key)
    assert (answer.code, answer.out) == (3, "")
    assert answer.err.startswith(f"kvgen: the user registry's entry {entry.key} is damaged: ")
