"""Many processes, and processes that are killed."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.commands import Machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PATIENCE_S = 400
"""For what takes some seconds on a machine that has nothing else to do."""

RECORDS = """
import json, pathlib
from kvgen.tune.trial_store import RECORD, journal_storage
import optuna
files = list(pathlib.Path({cache!r}).glob("studies/*.journal"))
count = 0
for file in files:
    storage = journal_storage(file)
    for name in optuna.get_all_study_names(storage):
        count += sum(RECORD in trial.user_attrs for trial in optuna.load_study(study_name=name, storage=storage).trials)
print(json.dumps(count))
"""


def finished_points(machine: Machine) -> int:
    """Lines of journals that hold a record: cheap enough to poll."""
    return sum(file.read_text(errors="replace").count('"record"') for file in (machine.root / "cache" / "studies").glob("*.journal"))


def wait_for_points(machine: Machine, process: subprocess.Popen[str], count: int) -> None:
    end = time.monotonic() + PATIENCE_S
    while finished_points(machine) < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.05)


def leftovers(machine: Machine) -> list[str]:
    """What is neither an entry, nor a compiled module or its name, a journal, a record of what was validated or an empty lock."""
    found = []
    for file in machine.root.rglob("*"):
        place = file.relative_to(machine.root)
        expected = place.parts[0] == "registry" and len(place.parts) == 5 and not place.parts[1].startswith(".")
        expected |= place.parts[:2] in {("cache", name) for name in ("modules", "sources", "studies", "validated")} or place.name == "tiny.yaml"
        empty_lock = file.suffix == ".lock" or file.name == ".lock"
        if file.is_file() and not expected and not (empty_lock and file.stat().st_size == 0):
            found.append(str(place))
    return found


def test_a_killed_run_is_resumed_and_nothing_is_measured_twice(tmp_path: Path):
    machine = Machine(tmp_path / "machine")
    build = ("build", machine.spec, "--backend", "cpu", "--trials", "4", "--json")
    process = machine.start(*build)
    wait_for_points(machine, process, 2)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = machine.python(RECORDS.format(cache=str(machine.root / "cache")))
    (result,) = machine.json(*build[:-1])
    assert before >= 2
    assert result["known"] == before
    after = machine.python(RECORDS.format(cache=str(machine.root / "cache")))
    assert after == before + result["measured"]
    assert leftovers(machine) == []


def test_ctrl_c_registers_the_best_so_far(tmp_path: Path):
    machine = Machine(tmp_path / "machine")
    process = machine.start("build", machine.spec, "--backend", "cpu", "--budget", "10m", "--json")
    wait_for_points(machine, process, 2)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, errors
    assert json.loads(output)[0]["interrupted"] is True
    assert "Traceback" not in errors
    (answer,) = machine.json("why", machine.spec)
    assert answer["how"] == "exact"


def test_eight_builds_at_once_one_killed_leave_one_good_entry(tmp_path: Path):
    machine = Machine(tmp_path / "machine")
    processes = [machine.start("build", machine.spec, "--backend", "cpu", "--trials", "3", "--json") for _ in range(8)]
    end = time.monotonic() + PATIENCE_S
    while not finished_points(machine) and time.monotonic() < end:
        time.sleep(0.05)
    locks = list((machine.root / "cache" / "tuning").glob("*.lock"))
    assert locks
    processes[3].send_signal(signal.SIGKILL)
    outputs = [process.communicate(timeout=PATIENCE_S) for process in processes]
    codes = [process.returncode for process in processes]
    assert codes.count(0) == 7, [error for _, error in outputs]
    assert codes[3] == -signal.SIGKILL
    (entry,) = [one for one in machine.json("list") if one["registry"] == "user"]
    assert entry["problem"] is None
    (checked,) = machine.json("check", machine.root / "registry")
    assert not checked["regressed"]
    assert leftovers(machine) == []
