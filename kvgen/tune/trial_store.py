"""Stores finished measurements and suggests schedules: one Optuna study per back end and workload.

A study's name contains everything that a measurement depends on, so an interrupted run continues where it stopped and a finished
candidate is never measured again. Failed candidates are stored as pruned trials: the sampler learns from them, and they are not repeated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import optuna
from filelock import FileLock
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import Trial, TrialState

from kvgen.errors import KvgenError, host_errors
from kvgen.lower.schedule import Params, Schedule, Value
from kvgen.lower.space import SearchSpace
from kvgen.spec import Workload
from kvgen.tune.candidate import Record

RECORD = "record"
SUGGESTIONS = 8
"""Draws of the sampler without a new schedule before it is considered exhausted."""

optuna.logging.set_verbosity(optuna.logging.WARNING)


class _JournalLock:
    """A lock of the journal, which the operating system releases when its holder dies."""

    def __init__(self, path: Path) -> None:
        self._lock = FileLock(path)

    def acquire(self) -> bool:
        self._lock.acquire()
        return True

    def release(self) -> None:
        self._lock.release()


def journal_storage(path: Path) -> optuna.storages.BaseStorage:
    """Storage in one file. An incomplete last line of a killed process is removed first.

    Raises HostError where the file cannot be opened or written.
    """
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    with host_errors("open the journal", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock")
        with FileLock(lock):
            _cut_half_line(path)
        return JournalStorage(JournalFileBackend(str(path), lock_obj=cast(Any, _JournalLock(lock))))


def url_storage(url: str) -> optuna.storages.BaseStorage:
    """Storage in a database that several hosts share, e.g. postgresql://user@host/name. Raises KvgenError if it cannot be opened."""
    try:
        return optuna.storages.RDBStorage(url)
    except Exception as error:  # of optuna, of SQLAlchemy, or of the database's driver
        reason = str(error.__cause__ or error).splitlines()[0]
        raise KvgenError(f"cannot open the storage {_without_password(url)}: {reason}") from error


def _without_password(url: str) -> str:
    return re.sub(r"(?<=//)([^:/@]*):[^@/]*@", r"\1:…@", url)


def _cut_half_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("r+b") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)


def flatten(schedule: Schedule) -> dict[str, Value]:
    """Parameters of a schedule by name; the prefixes `layout.` and `launch.` distinguish the two parts."""
    return {**{f"layout.{k}": v for k, v in schedule.layout.items()}, **{f"launch.{k}": v for k, v in schedule.launch.items()}}


def unflatten(backend: str, params: Mapping[str, Value]) -> Schedule:
    """Inverse of `flatten`."""

    def part(prefix: str) -> Params:
        return Params({name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)})

    return Schedule(backend, part("layout."), part("launch."))


class TrialStore:
    """The finished measurements of one back end at one workload."""

    def __init__(
        self, storage: optuna.storages.BaseStorage, name: str, space: SearchSpace, workload: Workload, seed: int, *, exclusive: bool = True
    ) -> None:
        """`exclusive`: no other process uses this study, so trials found running belong to a killed process."""
        self.space = space
        self.workload = workload
        self._values: dict[str, BaseDistribution] = {f"{p.part}.{p.name}": CategoricalDistribution(p.values) for p in space.parameters}
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=4)
        self.study = optuna.create_study(storage=storage, study_name=name, sampler=sampler, load_if_exists=True)
        self._open: dict[str, Trial] = {}
        self.records: dict[str, Record] = {}
        if exclusive:
            self._drop_unfinished()
        self.read()

    def _drop_unfinished(self) -> None:
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self.study.tell(trial.number, state=TrialState.FAIL)
        for _ in self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            self.study.tell(self.study.ask(), state=TrialState.FAIL)

    def read(self) -> list[Record]:
        """Read the study, with measurements of other hosts, and return the new records."""
        fresh = []
        for trial in self.study.get_trials(deepcopy=False):
            data = trial.user_attrs.get(RECORD)
            if data is not None and trial.state.is_finished():
                record = Record.from_json(data)
                if record.candidate.schedule.id not in self.records:
                    self.records[record.candidate.schedule.id] = record
                    fresh.append(record)
        return fresh

    def claimed_by_another(self, schedule: Schedule) -> bool:
        """Whether another host is measuring the schedule."""
        mine = {trial.number for trial in self._open.values()}
        others = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return any(unflatten(self.space.backend, t.params).id == schedule.id for t in others if t.number not in mine)

    def claim(self, schedule: Schedule) -> None:
        """Mark a schedule as being measured."""
        if schedule.id not in self._open:
            self.study.enqueue_trial(flatten(schedule))
            self._open[schedule.id] = self.study.ask(self._values)

    def suggest(self, layout: Params) -> Schedule | None:
        """A new schedule over the layout that the sampler expects to be good; None if it finds none."""
        for _ in range(SUGGESTIONS):
            self.study.enqueue_trial({f"layout.{name}": value for name, value in layout.items()})
            trial = self.study.ask(self._values)
            schedule = unflatten(self.space.backend, trial.params)
            new = schedule.id not in self.records and schedule.id not in self._open
            if new and not self.space.doubts(schedule, self.workload):
                self._open[schedule.id] = trial
                return schedule
            self.study.tell(trial, state=TrialState.FAIL)
        return None

    def release(self, schedule: Schedule) -> None:
        """Release a claimed schedule that was not measured."""
        trial = self._open.pop(schedule.id, None)
        if trial is not None:
            self.study.tell(trial, state=TrialState.FAIL)

    def close(self) -> None:
        """Release all claimed schedules."""
        for trial in self._open.values():
            self.study.tell(trial, state=TrialState.FAIL)
        self._open.clear()

    def finish(self, record: Record) -> None:
        """Store a finished measurement."""
        schedule = record.candidate.schedule
        self.claim(schedule)
        trial = self._open.pop(schedule.id)
        trial.set_user_attr(RECORD, record.to_json())
        if record.ok:
            self.study.tell(trial, record.cost)
        else:
            self.study.tell(trial, state=TrialState.PRUNED)
        self.records[schedule.id] = record
