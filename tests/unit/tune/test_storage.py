from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from optuna.storages import BaseStorage
from optuna.trial import TrialState

from kvgen.errors import HostError, KvgenError, ToolchainMissing
from kvgen.lower.schedule import Params, Schedule
from kvgen.lower.space import Parameter, SearchSpace
from kvgen.measure.measurement import Candidate, Measurement
from kvgen.spec import Workload
from kvgen.tune import storage
from kvgen.tune.storage import Study, open_database, open_file, storage_errors

SPACE = SearchSpace(
    "cpu",
    [
        Parameter("block", "layout", (32, 64), ""),
        Parameter("threads", "launch", (1, 2, 4, 8, 16), ""),
        Parameter("kind", "launch", ("a", "b"), ""),
    ],
)
WORK = Workload(batch=1, kv_len=128)


def candidate(block: int = 64, threads: int = 2, kind: str = "a") -> Candidate:
    return Candidate(Schedule("cpu", Params(block=block), Params(threads=threads, kind=kind)), WORK)


def record(one: Candidate, us: float = 5.0, kind: Any = "ok") -> Measurement:
    return one.measured(kind, "why", samples=(us - 1, us, us + 1), read_us=1.0, accuracy={"relative_l2": 1e-4})


def study(opened: Path | BaseStorage, seed: int = 0, shared: bool = False) -> Study:
    opened = open_file(opened) if isinstance(opened, Path) else opened
    return Study(opened, "study", list(SPACE.schedules()), SPACE.parameters, seed, shared=shared)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "ü?%41#.db"


def test_records_survive_the_process_and_the_last_of_a_candidate_counts(file: Path):
    first = study(file)
    kept = [record(candidate()), record(candidate(threads=4), kind="crash")]
    for item in [record(candidate(threads=4)), *kept]:
        first.finish(item)
    assert {*map(str, study(file).records.values())} == {*map(str, kept)}
    assert study(file).left == len(list(SPACE.schedules())) - 2


@pytest.mark.parametrize("held", [{"kindx": "ok"}, [1]])
def test_a_record_that_does_not_parse_is_named(file: Path, monkeypatch: pytest.MonkeyPatch, held: object):
    with monkeypatch.context() as patch:
        patch.setattr(Measurement, "to_json", lambda _: held)
        study(file).finish(record(candidate()))
    with pytest.raises(HostError, match=r"^trial 0 of the study study holds no measurement \(.*delete the study or its file"):
        study(file)


def test_a_file_that_cannot_be_opened_or_is_damaged_says_where_and_why(tmp_path: Path, file: Path):
    (tmp_path / "file").touch()
    with pytest.raises(HostError, match=r"cannot open the studies .*/file: File exists"):
        open_file(tmp_path / "file" / "a.db")
    file.write_bytes(b"no database" * 1000)
    with pytest.raises(
        HostError, match=f"cannot open the studies {re.escape(str(file))}: file is not a database; without the file"
    ) as told:
        open_file(file)
    assert "\n" not in str(told.value)


def test_proposals_learn_from_what_was_measured(file: Path):
    found = study(file)
    for threads in (1, 2, 4, 8):
        for kind in "ab":
            for block in (32, 64):
                found.finish(record(candidate(block, threads, kind), float(threads), "ok" if kind == "a" else "wrong"))
    for _ in range(2):
        found.claim(schedule := found.propose())
        assert schedule.launch["kind"] == "a"


def test_another_host_sees_what_is_measured(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'studies.db'}"
    one, other = (study(open_database(url), seed, shared=True) for seed in (0, 1))
    one.finish(record(candidate()))
    assert other.read() == [record(candidate())]
    assert other.read() == []
    assert other.records == one.records


def test_a_claim_that_another_host_took_for_dead_ends_in_a_trial_of_its_own(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'studies.db'}"
    one, other = (study(open_database(url), seed, shared=True) for seed in (0, 1))
    slow, given_back = candidate().schedule, candidate(threads=4).schedule
    for schedule in (slow, given_back):
        assert one.claim(schedule)
        other._storage.set_trial_state_values(one._claims[schedule.id], TrialState.FAIL)
    one.finish(record(candidate()))
    one.release(given_back)
    assert one.is_open(given_back)
    assert other.read() == [record(candidate())]
    assert one.claim(given_back)


def test_postgresql_is_opened_by_its_driver_of_today(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(storage, "RDBStorage", lambda url: url)
    assert open_database("postgresql://user:p%40ss@host/name") == "postgresql+psycopg://user:p%40ss@host/name"
    monkeypatch.setattr("kvgen.extras.find_spec", lambda name: None)
    with pytest.raises(ToolchainMissing, match=r"--storage postgresql:// needs psycopg: pip install 'kvgen\[postgresql\]'"):
        open_database("postgresql://user@host/name")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("nosuch://user:secret@host/name", "cannot open the storage nosuch://…: "),
        ("nosuch://host/name?password=sec@secret", "cannot open the storage nosuch://…: "),
        ("sqlite:////proc/nowhere/x.db", "cannot open the storage sqlite://…: "),
        ("user:secret@host/name", "no URL of a database: @, :, / and [?] of a password are written as %40"),
        ("nosuch://user:secret/name", "no URL of a database: "),
        ("nosuch://user:a@secret@host/name", "no URL of a database: "),
    ],
)
def test_a_database_that_does_not_open_is_named_without_its_password(url: str, reason: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    with pytest.raises(KvgenError, match=reason) as caught:
        open_database(url)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_storage_that_fails_on_the_way_is_named(tmp_path: Path):
    opened = open_database(f"sqlite:///{tmp_path / 'studies.db'}")
    (tmp_path / "studies.db").write_bytes(b"no database" * 1000)
    opened.engine.dispose()  # type: ignore[attr-defined]
    with pytest.raises(HostError, match="the storage failed, and what was measured until then is in it: "), storage_errors(None):
        study(opened)


def test_a_file_with_a_damaged_page_is_named(tmp_path: Path):
    file = tmp_path / "s.db"
    one = study(file)
    for threads in (1, 2, 4):
        one.finish(record(candidate(threads=threads)))
    content = bytearray(file.read_bytes())
    content[4096 * 2 :] = b"\xff" * (len(content) - 4096 * 2)
    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(content)
    with pytest.raises(HostError, match=f"{damaged}.*without the file its measurements are taken anew"), storage_errors(damaged):
        study(damaged)
