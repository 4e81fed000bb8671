"""Commands on terminals and pipes that take less than usual: other encodings, narrow ones, readers that end, Ctrl-C."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvgen.cli import app, output
from tests.support.commands import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_an_output_without_the_characters_of_tables_ends_no_command(machine: Machine):
    machine.environment |= {"PYTHONIOENCODING": "iso8859-5", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert "6.97 ?s" in machine.run("list").stdout
    machine.run("--help")
    machine.run("report", "-o", "report.html", "--key", "2bdc02ca")
    assert "\u00b5s" in (machine.root / "report.html").read_text(encoding="utf-8")


def test_a_reader_that_ends_is_no_regression(machine: Machine):
    reading, writing = os.pipe()
    os.close(reading)
    for words in (["presets"], ["presets", "--json"], ["schema"]):
        done = subprocess.run(
            machine.command(*words), env=machine.environment, stdout=writing, stderr=subprocess.PIPE, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (141, "")
    os.close(writing)


@pytest.mark.parametrize("words", [["presets"], ["presets", "--json"], ["list", "--json"]])
def test_a_full_disk_is_told_in_a_sentence(words: list[str], machine: Machine):
    with open("/dev/full", "w") as full:
        done = subprocess.run(machine.command(*words), env=machine.environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("kvgen: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_an_interrupt_is_told(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvgen.cli.doctor.examine", interrupted)
    with pytest.raises(SystemExit) as ended:
        app.main(["doctor", *words])
    told = capsys.readouterr()
    assert (ended.value.code, told.err) == (130, "kvgen: interrupted\n")
    if words:
        assert json.loads(told.out)["error"] == {"kind": "KeyboardInterrupt", "message": "interrupted", "exit": 130}


@pytest.mark.parametrize(("columns", "lists"), [(24, True), (40, False)])
def test_a_narrow_terminal_cuts_no_key(columns: int, lists: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    output.print_table("title", ["key", "spec", "why"], [("de0ff7626b9b7840", "tiny", "one two three four five six seven")])
    told = capsys.readouterr().out
    assert "de0ff7626b9b7840" in told
    assert ("key: de0ff7626b9b7840\nspec: tiny\nwhy: one two three" in told) == lists


def test_doctor_names_a_folder_that_cannot_be_written(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    from kvgen.cli.doctor import examine

    monkeypatch.setenv("KVGEN_REGISTRY_DIR", str(machine.root / "registry"))
    monkeypatch.setenv("KVGEN_CACHE_DIR", "/proc/1/cache")
    monkeypatch.setattr("os.access", lambda folder, _: not str(folder).startswith("/proc"))
    places = examine()["places"]
    assert places["cache"] == "/proc/1/cache: /proc/1 cannot be written"
    assert places["user registry"].endswith("(0 entries)")
