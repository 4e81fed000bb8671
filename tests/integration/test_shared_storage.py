"""Four processes tune over one PostgreSQL database, and one of them is killed: no finished measurement is lost, and none stays claimed."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvgen.errors import HostError, KvgenError, ToolchainMissing
from kvgen.measure.measurement import Measurement
from kvgen.tune.storage import RECORD, open_database, storage_errors
from tests.support.commands import ROOT

pytest.importorskip("psycopg")
pytestmark = pytest.mark.slow

WORKERS = 4
PATIENCE_S = 60.0
PROGRAM = """
import json, os, sys, time
from pathlib import Path
from kvgen.registry import Store
from kvgen.toolchain import Artifact, ArtifactCache, Resources
from kvgen.tune import measuring, storage, tuner
from tests.support.tuning import FakeBackend, FakeRunner, tiny_spec

storage.HEARTBEAT_S, storage.GRACE_S, tuner.AWAIT_S = 1, 4, 0.2
measuring.CompileQueue.build = lambda self, source: Artifact(source.id, Path("/nothing"), Resources("none", 0.0), source.id)
ArtifactCache.mark_verified = lambda *_: None

def say(*words):
    os.write(1, (json.dumps(words) + "\\n").encode())

class Runner(FakeRunner):
    hangs = False

    def measure(self, candidate, artifact, device):
        if self.hangs and len(self.measured) == 3:
            hung.touch()
            say("hangs", os.getpid(), [candidate.key for candidate in self.measured])
            time.sleep(1000)
        while not self.hangs and not hung.exists():  # or the others might leave it nothing
            time.sleep(0.02)
        return super().measure(candidate, artifact, device)

def work(number, url, root):
    runner = Runner()
    runner.hangs = number == 0
    place = dict(cache=ArtifactCache(root / "cache"), store=Store(root / "registry"), storage=url, runner=runner)
    result = tuner.tune(tiny_spec(), "cpu", backends=[FakeBackend()], seed=number, **place)
    final = sum(map(len, runner.finals))
    say("done", len(runner.measured) - final, {work.key: str(launch.params) for work, launch in result.entry.tuned})

hung = Path(sys.argv[2]) / "hung"
url, root, workers = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
children = []
for number in range(workers):  # forked, because what they import takes longer than what they do
    child = os.fork()
    if child == 0:
        work(number, url, root / str(number))
        os._exit(0)
    children.append(child)
sys.exit(sum(os.waitpid(child, 0)[1] != 0 for child in children))
"""


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    """The URL of a PostgreSQL server of its own: in a temporary folder, on a Unix socket, as another user where the tests run as root."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    folder = next((folder for folder in folders if (folder / "initdb").exists() and (folder / "postgres").exists()), None)
    if folder is None:
        pytest.skip("PostgreSQL's server (initdb, postgres) is not installed")
    root = Path(tempfile.mkdtemp(prefix="kvgen-pg-", dir="/tmp"))  # a socket's path has at most 107 bytes
    data, user = root / "data", {}
    if os.geteuid() == 0:  # which the server refuses to run as
        nobody = pwd.getpwnam("nobody")
        user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        os.chown(root, nobody.pw_uid, nobody.pw_gid)
    words = ["-D", data, "-U", "kvgen", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
    subprocess.run([folder / "initdb", *words], check=True, capture_output=True, cwd=root, **user)
    options = ["-D", data, "-k", root, "-c", "listen_addresses=", "-c", "fsync=off"]
    with (root / "log").open("wb") as log:
        running = subprocess.Popen([folder / "postgres", *options], stdout=log, stderr=log, cwd=root, start_new_session=True, **user)
    try:
        until = time.monotonic() + PATIENCE_S
        asking = [folder / "pg_isready", "-q", "-h", root, "-U", "kvgen", "-d", "postgres"]
        while subprocess.run(asking, check=False).returncode:
            if running.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"PostgreSQL did not start: {(root / 'log').read_text(errors='replace')}")
            time.sleep(0.1)
        yield f"postgresql://kvgen@/postgres?host={root}"
    finally:
        running.send_signal(signal.SIGINT)  # fast shutdown: it ends the connections that are open
        running.wait()
        shutil.rmtree(root, ignore_errors=True)


def test_a_killed_worker_loses_nothing_and_holds_nothing(database: str, tmp_path: Path):
    import optuna

    words = [sys.executable, "-c", PROGRAM, database, str(tmp_path), str(WORKERS)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KVGEN_MACHINE": '{"cores": 1}'}  # a worker claims two candidates ahead
    answers, finished = [], []
    with subprocess.Popen(words, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as run:
        try:
            assert run.stdout is not None
            for line in run.stdout:
                word, *told = json.loads(line)
                if word == "hangs":
                    os.kill(told[0], signal.SIGKILL)
                    finished = [tuple(key) for key in told[1]]
                else:
                    answers.append(told)
            _, err = run.communicate()
            assert (run.returncode, len(answers)) == (1, WORKERS - 1), err  # one of them was killed
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)

    storage = open_database(database)
    keys: list[tuple[str, str]] = []
    unfinished = []
    for name in optuna.get_all_study_names(storage):
        trials = optuna.load_study(study_name=name, storage=storage).trials
        unfinished += [trial.number for trial in trials if not trial.state.is_finished()]
        keys += [Measurement.from_json(trial.user_attrs[RECORD]).candidate.key for trial in trials if RECORD in trial.user_attrs]
    storage.engine.dispose()
    assert not unfinished
    assert len(set(keys)) == 17  # every candidate, also those that the killed worker had claimed
    assert len(finished) == 3
    assert set(finished) <= set(keys)
    assert len({json.dumps(launches, sort_keys=True) for *_, launches in answers}) == 1


def test_a_database_that_cannot_be_used_is_named(database: str, monkeypatch: pytest.MonkeyPatch):
    missing = database.replace("/postgres?", "/nowhere?")
    with pytest.raises(KvgenError, match=r"cannot open the storage postgresql://…@/nowhere.*does not exist"):
        open_database(missing)
    monkeypatch.setattr("kvgen.extras.find_spec", lambda name: None)
    with pytest.raises(ToolchainMissing, match=r"--storage postgresql:// needs psycopg: pip install 'kvgen\[postgresql\]'"):
        open_database(database)


def test_a_storage_that_fails_on_the_way_is_named(tmp_path: Path):
    from optuna.study import StudyDirection

    storage = open_database(f"sqlite:///{tmp_path / 'studies.db'}")
    (tmp_path / "studies.db").write_bytes(b"no database" * 1000)
    storage.engine.dispose()
    with pytest.raises(HostError, match="the storage failed, and what was measured until then is in it: "), storage_errors():
        storage.create_new_study([StudyDirection.MINIMIZE])
