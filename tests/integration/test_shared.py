"""Hosts that share a study in PostgreSQL: they divide it, survive SIGKILL of one, and print no password."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from glob import glob
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from kvgen.tune.storage import CLAIM, RECORD, open_database
from tests.support.tuning import FakeBackend, tiny_spec

EVERY = 17
"""Candidates of the tests' back end."""
SECRET = "p@ss/word"
PATHS = os.pathsep.join([os.environ["PATH"], *glob("/usr/lib/postgresql/*/bin")])
pytestmark = [
    pytest.mark.skipif(shutil.which("pg_ctl", path=PATHS) is None, reason="PostgreSQL is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of its own, on a socket. It refuses to run as root."""
    folder = Path(tempfile.mkdtemp(prefix="kvgen-pg-"))  # pytest's own folders are root's alone
    as_user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.getuid() == 0 else []
    (folder / "password").write_text(SECRET)
    for path in (folder, folder / "password") if as_user else ():
        os.chown(path, 65534, 65534)

    def pg_ctl(command: str, *options: str) -> None:
        words = ["pg_ctl", command, "-w", "-D", str(folder / "data"), *options]
        subprocess.run([*as_user, *words], check=True, cwd=folder, env={**os.environ, "PATH": PATHS}, stdout=subprocess.DEVNULL)

    pg_ctl("initdb", "-o", f"-U kvgen -A scram-sha-256 --pwfile={folder / 'password'} --no-sync")
    pg_ctl("start", "-t", "120", "-l", str(folder / "log"), "-o", f"-F -c listen_addresses= -k {folder}")
    try:
        yield f"postgresql://kvgen:{SECRET.replace('@', '%40').replace('/', '%2F')}@/postgres?host={folder}"
    finally:
        pg_ctl("stop", "-m", "immediate")
        shutil.rmtree(folder)


def host(url: str, folder: Path, stale: float = 900.0) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.sharing", url, str(folder), str(stale)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def result(one: subprocess.Popen[str]) -> tuple[int, str]:
    """How many candidates a host measured that has begun or can begin, and the winner's block."""
    told, _ = one.communicate("\n", timeout=300)
    assert one.returncode == 0, told
    count, block = told.splitlines()[-1].split()
    return int(count), block


def test_hosts_divide_a_study_and_survive_one_that_is_killed(url: str, tmp_path: Path):
    one, other = (host(url, tmp_path / name) for name in ("one", "other"))
    assert [each.stdout.readline() for each in (one, other) if each.stdout] == ["ready\n"] * 2
    for each in (one.stdin, other.stdin):
        assert each
        print(file=each, flush=True)
    for _ in range(4):  # while it measures more
        assert one.stdout
        one.stdout.readline()
    one.kill()
    one.communicate()
    survivor, rest = result(other), result(host(url, tmp_path / "rest", stale=-1.0))
    assert survivor[0] + rest[0] <= EVERY
    assert (survivor[1], rest[1]) == ("32", "32")

    opened = open_database(url)
    trials = [trial for name in optuna.get_all_study_names(opened) for trial in optuna.load_study(study_name=name, storage=opened).trials]
    assert {trial.state for trial in trials} <= {TrialState.COMPLETE, TrialState.FAIL}
    measured = Counter((trial.user_attrs[CLAIM][0], str(trial.user_attrs[RECORD]["workload"])) for trial in trials if trial.values)
    assert len(measured) == EVERY
    default = FakeBackend().default(tiny_spec(), "cpu").id  # which every host measures itself
    assert {schedule for (schedule, _), times in measured.items() if times > 1} <= {default}


def test_a_wrong_password_is_refused_and_not_printed(url: str, tmp_path: Path):
    told, _ = host(url.replace("p%40ss", "pa%40ss"), tmp_path).communicate("\n", timeout=300)
    assert "cannot open the storage postgresql://…: " in told
    assert "word" not in told.replace("password", "")
