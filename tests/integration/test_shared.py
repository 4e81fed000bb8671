"""Hosts that share a study in PostgreSQL: they divide it, survive SIGKILL of one, and print no password."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from kvgen.tune.storage import RECORD, open_database

EVERY = 17
"""Candidates of the tests' back end."""
SECRET = "p@ss/word"
pytestmark = [
    pytest.mark.skipif(shutil.which("initdb") is None, reason="PostgreSQL is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]


@pytest.fixture
def url() -> Iterator[str]:
    """A server of its own, on a socket. It refuses to run as root."""
    folder = Path(tempfile.mkdtemp(prefix="kvgen-pg-"))  # pytest's own folders are root's alone
    as_user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.getuid() == 0 else []
    (folder / "password").write_text(SECRET)
    for path in (folder, folder / "password") if as_user else ():
        os.chown(path, 65534, 65534)
    data = folder / "data"
    made = ["initdb", "-D", str(data), "-U", "kvgen", "-A", "scram-sha-256", "--pwfile", str(folder / "password"), "--no-sync"]
    subprocess.run([*as_user, *made], check=True, capture_output=True, cwd=folder)
    options = ["-F", "-c", "listen_addresses=", "-k", str(folder)]
    server = subprocess.Popen([*as_user, "postgres", "-D", str(data), *options], cwd=folder, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            if (folder / ".s.PGSQL.5432").exists():
                break
            time.sleep(0.1)
        yield f"postgresql://kvgen:{SECRET.replace('@', '%40').replace('/', '%2F')}@/postgres?host={folder}"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)
        shutil.rmtree(folder)


def host(url: str, folder: Path, stale: float = 900.0) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.sharing", url, str(folder), str(stale)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def trials(url: str) -> list[optuna.trial.FrozenTrial]:
    opened = open_database(url)
    return [trial for name in optuna.get_all_study_names(opened) for trial in optuna.load_study(study_name=name, storage=opened).trials]


def test_hosts_divide_a_study_and_survive_one_that_is_killed(url: str, tmp_path: Path):
    one, other = (host(url, tmp_path / name) for name in ("one", "other"))
    until = time.monotonic() + 300
    while time.monotonic() < until and sum(RECORD in trial.user_attrs for trial in trials(url)) < 4:
        time.sleep(0.02)
    one.kill()
    one.communicate()
    told, _ = other.communicate(timeout=300)
    assert other.returncode == 0, told
    rest, _ = host(url, tmp_path / "rest", stale=-1.0).communicate(timeout=300)
    assert int(told.split()[0]) + int(rest.split()[0]) <= EVERY
    assert (told.split()[1], rest.split()[1]) == ("32", "32")
    found = trials(url)
    assert {trial.state for trial in found} <= {TrialState.COMPLETE, TrialState.FAIL}
    found = [trial for trial in found if trial.state == TrialState.COMPLETE]  # both hosts claim the defaults, and one of them died
    measured = Counter(tuple(trial.user_attrs[RECORD][name] for name in ("schedule", "workload")).__repr__() for trial in found)
    assert len(measured) == EVERY
    assert len(found) <= EVERY + 2, "hosts that ask at the same moment may take the same"


def test_a_wrong_password_is_refused_and_not_printed(url: str, tmp_path: Path):
    told, _ = host(url.replace("p%40ss", "pa%40ss"), tmp_path).communicate(timeout=300)
    assert "cannot open the storage postgresql://…: " in told
    assert "word" not in told.replace("password", "")
