"""Many processes, and processes that are killed."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.support.commands import Machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PATIENCE_S = 400
"""For what takes some seconds on a machine that has nothing else to do."""


def finished_points(machine: Machine) -> int:
    """Measurements in the files of studies: cheap enough to poll."""
    points = 0
    for file in (machine.root / "cache" / "studies").glob("*.db"):
        with suppress(sqlite3.OperationalError), closing(sqlite3.connect(file)) as study:  # its tables are being made
            points += study.execute("SELECT count(*) FROM trial_user_attributes WHERE key = 'record'").fetchone()[0]
    return points


def leftovers(machine: Machine) -> list[str]:
    """What is neither an entry, nor a compiled module or its name, a file of studies, an empty lock or a scratch folder."""
    found = []
    for file in machine.root.rglob("*"):
        place = file.relative_to(machine.root)
        expected = place.parts[0] == "registry" and len(place.parts) == 3 and not place.parts[1].startswith(".")
        expected |= place.parts[:2] in {("cache", name) for name in ("modules", "sources", "studies", "tmp")} or place.name == "tiny.yaml"
        empty_lock = file.suffix == ".lock" or file.name == ".lock"
        if file.is_file() and not expected and not (empty_lock and file.stat().st_size == 0):
            found.append(str(place))
    return found


def test_builds_at_once_of_which_one_is_killed_lose_nothing_measure_nothing_twice_and_leave_one_good_entry(tmp_path: Path):
    machine = Machine(tmp_path / "machine")
    build = ("build", machine.spec, "--backend", "cpu", "--trials", "3", "--json")
    processes = [machine.start(*build)]
    end = time.monotonic() + PATIENCE_S
    while finished_points(machine) < 2:
        assert processes[0].poll() is None, processes[0].communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.05)
        if len(processes) < 2 and finished_points(machine):
            processes.append(machine.start(*build))  # it waits for the first one
    processes[0].send_signal(signal.SIGKILL)
    outputs = [process.communicate(timeout=PATIENCE_S) for process in processes]
    assert [process.returncode for process in processes] == [-signal.SIGKILL, *[0] * (len(processes) - 1)], [error for _, error in outputs]
    results = [json.loads(output)[0] for output, _ in outputs[1:]] or machine.json(*build[:-1])
    resumed = next(result for result in results if not result["reused"])
    assert resumed["known"] >= 2
    assert finished_points(machine) == resumed["known"] + sum(result["measured"] for result in results if not result["reused"])
    (entry,) = [one for one in machine.json("list") if one["registry"] == "user"]
    assert entry["problem"] is None
    assert leftovers(machine) == []


STUCK = """#!/bin/sh
case "$1" in -dump*) exec {gxx} "$@"; esac
[ -e {stuck} ] && sleep 86400
exec {gxx} "$@"
"""
"""A compiler that takes for ever once there is a file `stuck`."""


def family(pid: int) -> dict[int, str]:
    """The processes that a process has started, and theirs: command lines by id."""
    found: dict[int, str] = {}
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found |= {child: Path(f"/proc/{child}/cmdline").read_text().replace("\0", " "), **family(child)}
    return found


def ended(machine: Machine, stuck: Path, words: Sequence[object], signalled: signal.Signals) -> tuple[str, str]:
    """The output of a command that is stopped once two candidates are measured and a compiler is stuck; nothing that it started is left."""
    process = machine.start(*words)
    children: dict[int, str] = {}
    end = time.monotonic() + PATIENCE_S
    while not any(command.startswith("sleep") for command in children.values()):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, children
        time.sleep(0.1)
        if finished_points(machine) >= 2:
            stuck.touch()
        with suppress(OSError):  # one of them has ended meanwhile
            children = family(process.pid)
    for _ in range(20):  # coreutils' timeout sends two, a little apart where the machine is busy
        process.send_signal(signalled)
        time.sleep(0.05)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    while left := [command for pid, command in children.items() if running(pid)]:  # what was killed may take a moment to end
        assert time.monotonic() < end, left
        time.sleep(0.1)
    return output, errors


def running(pid: int) -> bool:
    """Whether a process runs; one that has ended may wait for its new parent to hear of it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_sigterm_and_ctrl_c_end_a_command_register_the_best_so_far_and_leave_no_process(tmp_path: Path):
    machine = Machine(tmp_path / "machine")
    compiler, stuck = tmp_path / "g++", tmp_path / "stuck"
    compiler.write_text(STUCK.format(gxx=shutil.which("g++"), stuck=stuck))
    compiler.chmod(0o755)
    machine.environment |= {"CXX": str(compiler), "KVGEN_MACHINE": '{"cores": 2, "llc_bytes": 1048576}'}
    output, _ = ended(machine, stuck, ("build", machine.spec, "--backend", "cpu", "--budget", "1h", "--json"), signal.SIGTERM)
    assert json.loads(output)[0]["interrupted"] is True
    (answer,) = machine.json("why", machine.spec)
    assert answer["how"] == "exact"
    machine.environment["KVGEN_CACHE_DIR"] = str(tmp_path / "empty")
    _, errors = ended(machine, stuck, ("check", machine.root / "registry"), signal.SIGINT)
    assert errors.endswith("kvgen: interrupted\n")
