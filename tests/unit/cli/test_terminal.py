"""Commands on terminals and pipes that take less than usual: other encodings, narrow ones, readers that end, Ctrl-C and SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

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


def test_a_bench_that_is_terminated_leaves_no_process(machine: Machine):
    """Not the compilers of its kernel, which it starts first."""

    def running() -> int:
        found = 0
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                found += str(machine.root).encode() in environment.read_bytes()
        return found

    bench, until = machine.start("bench", machine.spec, "--alone"), time.monotonic() + PATIENCE_S
    while running() < 3:
        assert time.monotonic() < until
        assert bench.poll() is None, bench.communicate()
        time.sleep(0.02)
    bench.send_signal(signal.SIGTERM)
    assert bench.wait(PATIENCE_S) == 130
    while running():  # what was killed may take a moment to end
        assert time.monotonic() < until
        time.sleep(0.02)
