"""Measurements of earlier and of other builds, and what is tried next: Optuna studies, one per back end and workload, in a file or a shared
database.

A finished measurement is one whole trial, so a killed process leaves no half of one. In a shared database a candidate is claimed by a
running trial, which its measurement completes, so that builds divide the space; one that a build leaves behind waits for the next.
"""

from __future__ import annotations

import math
import random
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.storages import BaseStorage, RDBStorage, get_storage
from optuna.trial import TrialState, create_trial
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from kvgen.errors import HostError, KvgenError, host_errors
from kvgen.extras import require
from kvgen.lower.schedule import Schedule, Value
from kvgen.lower.space import Parameter
from kvgen.measure.measurement import Measurement
from kvgen.tune.surrogate import Surrogate

RECORD, CLAIM = "record", "claim"
"""Attributes of a trial: the measurement; the schedule's id and the time of its claim."""
STALE_S = 900.0
"""Seconds after which a claim in a shared database is one of a build that died."""
STARTERS = 4
"""Measurements before the model's first guess."""
ATTEMPTS = 3
"""Processes that open a new database at once collide while they create its tables; all but one try again."""

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Study:
    """The schedules of one back end at one workload: what was measured, and what is still open.

    `propose` gives an open schedule, so that every trial is of one that can be built and that was not tried.
    """

    def __init__(
        self,
        storage: BaseStorage,
        name: str,
        schedules: Sequence[Schedule],
        parameters: Sequence[Parameter],
        seed: int,
        *,
        shared: bool = False,
    ) -> None:
        """A study by this name, created if there is none. `shared`: other processes may use it at the same time.

        Raises HostError where it holds what is no measurement.
        """
        self._storage, self._name, self._shared = get_storage(storage), name, shared
        optuna.create_study(storage=self._storage, study_name=name, load_if_exists=True)
        self._id = self._storage.get_study_id_from_name(name)
        self._random = random.Random(seed)
        self._axes = {f"{p.part}.{p.name}": Axis(p.values) for p in parameters}
        self._row = {one.id: row for row, one in enumerate(schedules)}
        self._schedules, self._open = list(schedules), np.ones(len(schedules), bool)
        places = [[axis.values.index(flat[name]) for name, axis in self._axes.items()] for flat in map(flatten, schedules)]
        steps = [len(axis.values) - 1 if axis.ordinal else 0 for axis in self._axes.values()]
        self._model = Surrogate(places, steps)
        self._claims: dict[str, int | None] = {}
        """Of this process, by the schedule's id: the running trial in a shared storage."""
        self._waiting: dict[str, int] = {}
        """Trials that no process works on."""
        self._seen: set[int] = set()
        self.records: dict[str, Measurement] = {}
        """By the schedule's id; of several measurements the last."""
        self.read()

    @property
    def left(self) -> int:
        """Schedules that are open."""
        return int(self._open.sum())

    def is_open(self, schedule: Schedule) -> bool:
        """Whether the schedule belongs to the space, and is neither claimed nor measured."""
        return self._is_open(schedule.id)

    def read(self) -> list[Measurement]:
        """What was finished since the last call, by other processes too. Claims of a process that died are open again."""
        news = []
        trials = self._storage.get_all_trials(self._id, deepcopy=False)
        for trial in sorted(trials, key=lambda trial: not trial.state.is_finished()):
            key, since = trial.user_attrs.get(CLAIM, ("", 0.0))
            if trial.number in self._seen or key in self._claims:
                continue
            if trial.state.is_finished():
                self._seen.add(trial.number)
                if RECORD not in trial.user_attrs:
                    continue
                news.append(self._parsed(trial.number, trial.user_attrs[RECORD]))
                key = news[-1].candidate.schedule.id
                self._waiting.pop(key, None)
            else:
                where = self._storage.get_trial_id_from_study_id_trial_number(self._id, trial.number)
                waits, measured = trial.state == TrialState.WAITING, key in self.records
                if time.time() - since > STALE_S and (measured or not waits):  # of a dead host, which another one may have replaced
                    self._move(where, TrialState.FAIL if measured else TrialState.WAITING)
                    waits = True
                if measured:
                    continue
                if waits:
                    self._waiting[key] = where
                self._set_open(key, waits)
                continue
            self._set_open(key, False)
        return news

    def propose(self) -> Schedule:
        """The open schedule that is expected to gain most over the best one, or any while too few are measured, or none ran.

        One must be open.
        """
        rows = np.flatnonzero(self._open)
        costs = {self._row[key]: one.cost for key, one in self.records.items() if key in self._row}
        if len(costs) >= STARTERS and math.isfinite(min(costs.values())):
            pending = np.flatnonzero(~self._open)
            pending = pending[~np.isin(pending, list(costs))]
            gains = self._model.improvements(rows, np.array(list(costs)), np.array(list(costs.values())), pending)
            rows = rows[gains >= gains.max() - 1e-12]
        schedule: Schedule = self._schedules[self._random.choice(rows)]
        return schedule

    def claim(self, schedule: Schedule, *, anyway: bool = False) -> bool:
        """Claim a schedule: any one that can be built. False where another process was first; `anyway`: both measure it."""
        trial, claim = self._waiting.pop(schedule.id, None), (schedule.id, time.time())
        self._set_open(schedule.id, False)
        if trial is not None and not self._move(trial, TrialState.RUNNING, {CLAIM: claim}):
            trial = None
        if trial is None and self._shared:
            trial = self._create(schedule, TrialState.RUNNING, {CLAIM: claim})
        if trial is not None and not anyway and self._is_claimed_before(trial, schedule):
            self._move(trial, TrialState.FAIL)
            return False
        self._claims[schedule.id] = trial
        return True

    def release(self, schedule: Schedule) -> None:
        """Give a claim back: the schedule is not measured now."""
        trial = self._claims.pop(schedule.id)
        if trial is not None:
            self._waiting[schedule.id] = trial
            self._move(trial, TrialState.WAITING)
        self._set_open(schedule.id, True)

    def finish(self, record: Measurement) -> None:
        """Store a measurement. A failure is a pruned trial."""
        schedule = record.candidate.schedule
        state, cost = (TrialState.COMPLETE, record.cost) if record.timed else (TrialState.PRUNED, None)
        trial, stored = self._claims.pop(schedule.id, None), {RECORD: record.to_json()}
        if trial is None or not self._move(trial, state, stored, cost):
            trial = self._create(schedule, state, stored, cost)
        self._seen.add(self._storage.get_trial_number_from_id(trial))
        self.records[schedule.id] = record
        self._set_open(schedule.id, False)

    def _move(self, trial: int, state: TrialState, attributes: Mapping[str, Any] | None = None, cost: float | None = None) -> bool:
        """Give a trial attributes and then a state. False where another process has finished it, or runs it already."""
        try:
            for name, value in (attributes or {}).items():
                self._storage.set_trial_user_attr(trial, name, value)
            return self._storage.set_trial_state_values(trial, state, None if cost is None else [cost])
        except optuna.exceptions.UpdateFinishedTrialError:
            return False

    def _is_claimed_before(self, trial: int, schedule: Schedule) -> bool:
        """Whether a trial of less number, which was stored before this one, has the schedule: of two claims the first counts."""
        states = (TrialState.RUNNING, TrialState.COMPLETE, TrialState.PRUNED)
        number, others = (
            self._storage.get_trial_number_from_id(trial),
            self._storage.get_all_trials(self._id, deepcopy=False, states=states),
        )
        return any(one.number < number and one.user_attrs.get(CLAIM, ("",))[0] == schedule.id for one in others)

    def _create(self, schedule: Schedule, state: TrialState, attributes: dict[str, Any], cost: float | None = None) -> int:
        params = {name: self._axes[name].stored(value) for name, value in flatten(schedule).items()}
        distributions = {name: axis.distribution for name, axis in self._axes.items()}
        trial = create_trial(state=state, value=cost, params=params, distributions=distributions, user_attrs=attributes)
        return self._storage.create_new_trial(self._id, trial)

    def _parsed(self, number: int, stored: object) -> Measurement:
        try:
            record = Measurement.from_json(stored)
            self.records[record.candidate.schedule.id] = record
        except (ValueError, AssertionError) as error:
            what = f"trial {number} of the study {self._name} holds no measurement ({error})"
            raise HostError(f"{what}: delete the study or its file, and its measurements are taken anew") from error
        return record

    def _is_open(self, key: str) -> bool:
        return key in self._row and bool(self._open[self._row[key]])

    def _set_open(self, key: str, state: bool) -> None:
        if key in self._row:
            self._open[self._row[key]] = state


class Axis:
    """A parameter as Optuna knows it: a number by its place in the order of the space, anything else as it is."""

    def __init__(self, values: tuple[Value, ...]) -> None:
        self.values = values
        self.ordinal = all(type(value) is int for value in values)
        last = len(values) - 1
        self.distribution: BaseDistribution = IntDistribution(0, last) if self.ordinal else CategoricalDistribution(values)

    def stored(self, value: Value) -> Value:
        """What a trial has of a value."""
        return self.values.index(value) if self.ordinal else value


def flatten(schedule: Schedule) -> dict[str, Value]:
    """Parameters of a schedule by name; the prefixes `layout.` and `launch.` distinguish the two parts."""
    return {**{f"layout.{k}": v for k, v in schedule.layout.items()}, **{f"launch.{k}": v for k, v in schedule.launch.items()}}


# --- where they are ----------------------------------------------------------------------------------------------------


def open_file(path: Path) -> BaseStorage:
    """Storage in one file of SQLite. Raises HostError where it cannot be opened or is damaged."""
    with host_errors("open the studies", path):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:  # by a path and not by a URL, which cannot hold every path
        return RDBStorage("sqlite://", engine_kwargs={"creator": lambda: sqlite3.connect(path, timeout=60)})
    except Exception as error:  # of optuna, of SQLAlchemy, or of SQLite
        raise HostError(
            f"cannot open the studies {path}: {_reason(error)}; without the file its measurements are taken anew", path
        ) from None


def open_database(url: str) -> BaseStorage:
    """Storage in a database that several hosts share, e.g. postgresql://user@host/name. Raises KvgenError, which repeats no password, if it
    cannot be opened, ToolchainMissing without PostgreSQL's driver.
    """
    try:
        place = make_url(url)
        if "@" in (place.host or ""):
            raise ValueError("what follows the first @ may be a part of the password")
    except (ValueError, ArgumentError):
        raise KvgenError("the storage is no URL of a database: @, :, / and ? of a password are written as %40, %3A, %2F and %3F") from None
    kind = place.drivername
    if kind in ("postgres", "postgresql"):
        require("--storage postgresql://", "psycopg")
        url = place.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return RDBStorage(url)
        except Exception as error:  # of optuna, of SQLAlchemy, or of the database's driver
            reason = _reason(error)
        time.sleep(random.uniform(0.1, 0.5) * attempt)
    raise KvgenError(f"cannot open the storage {kind}://…: {reason}")


@contextmanager
def storage_errors(file: Path | None) -> Iterator[None]:
    """Turn failures of the database in a file, or of a shared one, into HostError."""
    try:
        yield
    except optuna.exceptions.StorageInternalError as error:
        if file is None:
            raise HostError(f"the storage failed, and what was measured until then is in it: {_reason(error)}") from error
        raise HostError(f"the studies {file} failed: {_reason(error)}; without the file its measurements are taken anew", file) from error


def _reason(error: Exception) -> str:
    return next(iter(str(error.__cause__ or error).splitlines()), type(error).__name__)
