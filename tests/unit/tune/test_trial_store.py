from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from optuna.storages.journal import JournalFileBackend

from kvgen.errors import HostError
from kvgen.lower.schedule import Params, Schedule
from kvgen.lower.space import Parameter, SearchSpace
from kvgen.spec import Workload
from kvgen.tune.candidate import Candidate, Record
from kvgen.tune.shared_storage import open_database
from kvgen.tune.trial_store import TrialStore, flatten, journal_storage, unflatten

SPACE = SearchSpace(
    "cpu",
    [
        Parameter("block", "layout", (32, 64), ""),
        Parameter("threads", "launch", (1, 2, 4), ""),
        Parameter("kind", "launch", ("a", "b"), ""),
    ],
)
WORK = Workload(batch=1, kv_len=128)


def schedule(block: int = 64, threads: int = 2, kind: str = "a") -> Schedule:
    return Schedule("cpu", Params(block=block), Params(threads=threads, kind=kind))


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "study.journal"


def trial_store(journal: Path) -> TrialStore:
    return TrialStore(journal_storage(journal), "study", SPACE, WORK, seed=0)


def record(schedule: Schedule, us: float | None = 5.0, kind: str = "ok") -> Record:
    return Record(Candidate(schedule, WORK), kind, us, read_us=1.0, samples=(4.0, 6.0), accuracy={"relative_l2": 1e-4}, detail="why")


def test_flatten_keeps_the_parts_apart():
    assert unflatten("cpu", flatten(schedule())) == schedule()


def test_records_survive_the_process(journal: Path):
    first = trial_store(journal)
    kept = [record(schedule()), record(schedule(threads=4), None, "crash")]
    for item in kept:
        first.finish(item)
    again = trial_store(journal)
    assert list(again.records.values()) == kept


def test_a_module_that_fails_after_all_is_remembered_as_failed(journal: Path):
    first = trial_store(journal)
    first.finish(record(schedule()))
    failed = record(schedule(), None, "wrong")
    first.finish(failed)
    assert first.read() == []
    assert list(trial_store(journal).records.values()) == [failed]


def test_a_write_that_fails_leaves_no_half_line(journal: Path, monkeypatch: pytest.MonkeyPatch):
    """The disk is full for one line, and not for the next one."""
    first = trial_store(journal)
    first.finish(record(schedule()))
    whole = journal.read_bytes()
    append = JournalFileBackend.append_logs

    def full(self: JournalFileBackend, logs: list[dict[str, Any]]) -> None:
        with journal.open("ab") as file:
            file.write(b'{"op_code": 4, "half')
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(JournalFileBackend, "append_logs", full)
    with pytest.raises(HostError, match=f"cannot write the journal {journal}: No space left"):
        first.finish(record(schedule(threads=4)))
    assert journal.read_bytes() == whole
    monkeypatch.setattr(JournalFileBackend, "append_logs", append)
    first.finish(record(schedule(threads=1)))
    assert len(trial_store(journal).records) == 2


def test_a_damaged_journal_is_named(journal: Path):
    trial_store(journal).finish(record(schedule()))
    journal.write_bytes(b'{"half\n' + journal.read_bytes())
    with pytest.raises(HostError, match=f"the journal {journal} is damaged"):
        trial_store(journal)


@pytest.mark.parametrize("line", [b"{}", b"null", b"[1]", b'{"op_code": 99}', b"\0\0\0"])
def test_a_line_that_is_no_operation_is_damage(journal: Path, line: bytes):
    trial_store(journal).finish(record(schedule()))
    journal.write_bytes(journal.read_bytes() + line + b"\n" + b"{}\n")
    with pytest.raises(HostError, match=f"the journal {journal} is damaged") as told:
        trial_store(journal)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("held", [{"kindx": "ok"}, [1]])
def test_a_record_that_does_not_parse_is_named(journal: Path, monkeypatch: pytest.MonkeyPatch, held: object):
    with monkeypatch.context() as patch:
        patch.setattr(Record, "to_json", lambda _: held)
        trial_store(journal).finish(record(schedule()))
    with pytest.raises(HostError, match=r"^trial 0 of the study study holds no measurement \(.*delete the study or its journal"):
        trial_store(journal)


@pytest.mark.parametrize("end", [b'{"op_code": 4, "half', b'{"op_code": 4, "half\n', b"\n", b'{"op_code": 4{"op_code": 4}\n', b"\0\0\0"])
def test_a_claim_of_a_killed_run_is_dropped_and_a_damaged_last_line_cut(journal: Path, end: bytes):
    first = trial_store(journal)
    first.finish(record(schedule()))
    first.claim(schedule(threads=4))
    with journal.open("ab") as file:
        file.write(end)
    again = trial_store(journal)
    assert list(again.records) == [schedule().id]
    again.finish(record(schedule(threads=4)))
    assert len(trial_store(journal).records) == 2


def test_suggestions_stay_on_the_layout_and_are_never_what_was_measured(journal: Path):
    found = trial_store(journal)
    seen = set()
    for _ in range(20):
        guess = found.suggest(Params(block=32))
        if guess is None:
            break
        assert guess.layout == Params(block=32)
        assert guess.id not in seen
        seen.add(guess.id)
        failed = guess.launch["kind"] == "b"
        found.finish(record(guess, None if failed else float(guess.launch.integer("threads")), "wrong" if failed else "ok"))
    assert len(seen) >= 3
    assert found.study.best_value == min(r.cost for r in found.records.values())


def test_released_claims_can_be_claimed_again(journal: Path):
    found = trial_store(journal)
    found.claim(schedule())
    found.release(schedule())
    found.finish(record(schedule()))
    assert trial_store(journal).records[schedule().id].us == 5.0


def test_another_host_sees_what_is_measured_and_what_is_being_measured(tmp_path: Path):
    storage = f"sqlite:///{tmp_path / 'studies.db'}"
    one, other = (TrialStore(open_database(storage), "study", SPACE, WORK, seed, exclusive=False) for seed in (0, 1))
    one.claim(schedule())
    assert other.claimed_elsewhere() == {schedule().id}
    assert not one.claimed_elsewhere()
    assert not other.claim(schedule())
    assert one.claim(schedule())
    one.finish(record(schedule()))
    assert not other.claimed_elsewhere()
    assert other.read() == [record(schedule())]
    assert other.read() == []
