"""Commands on terminals and pipes that take less than usual: other encodings, narrow ones, readers that end, Ctrl-C and SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from kvgen.cli import output
from tests.support.commands import PATIENCE_S, Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_an_output_without_the_characters_of_tables_ends_no_command(machine: Machine):
    machine.environment |= {"PYTHONIOENCODING": "iso8859-5", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert " ?s" in machine.run("list").stdout
    machine.run("--help")


def test_a_reader_that_ends_is_no_regression(machine: Machine):
    reading, writing = os.pipe()
    os.close(reading)
    for words in (["presets"], ["schema"]):
        done = subprocess.run(
            machine.command(*words), env=machine.environment, stdout=writing, stderr=subprocess.PIPE, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (141, "")
    os.close(writing)


@pytest.mark.parametrize("words", [["presets"], ["presets", "--json"]])
def test_a_full_disk_is_told_in_a_sentence(words: list[str], machine: Machine):
    with open("/dev/full", "w") as full:
        done = subprocess.run(machine.command(*words), env=machine.environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("kvgen: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_an_interrupt_is_told(kvgen: Any, words: list[str], monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvgen.cli.machine.examine", interrupted)
    answer = kvgen("doctor", *words)
    assert (answer.code, answer.err) == (130, "kvgen: interrupted\n")
    if words:
        assert json.loads(answer.out)["error"] == {"kind": "KeyboardInterrupt", "message": "interrupted", "exit": 130}


def test_a_bench_that_is_terminated_leaves_no_process(machine: Machine):
    """It compiles its kernel first: the compiler must end with it."""
    running = machine.start("bench", machine.spec, "--alone")
    until = time.monotonic() + PATIENCE_S

    def descendants() -> set[int]:
        found, parents = set(), {running.pid}
        for _ in range(4):
            parents = {int(stat.parent.name) for stat in Path("/proc").glob("[0-9]*/stat") if _parent(stat) in parents}
            found |= parents
        return found

    while not (children := {pid for pid in descendants() if "cc1plus" in _name(pid)}):
        assert time.monotonic() < until
        assert running.poll() is None, running.communicate()
        time.sleep(0.02)
    running.send_signal(signal.SIGTERM)
    assert running.wait(PATIENCE_S) == 130
    time.sleep(0.2)
    assert not [pid for pid in children if "cc1plus" in _name(pid)]


def _parent(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _name(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return "" if text.rpartition(")")[2].split()[0] == "Z" else text


@pytest.mark.parametrize(("columns", "lists"), [(24, True), (40, False)])
def test_a_narrow_terminal_cuts_no_key(columns: int, lists: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    output.print_table("title", ["key", "spec", "why"], [("de0ff7626b9b7840", "tiny", "one two three four five six seven")])
    told = capsys.readouterr().out
    assert "de0ff7626b9b7840" in told
    assert ("key: de0ff7626b9b7840\nspec: tiny\nwhy: one two three" in told) == lists
