"""Measurements of earlier and of other builds: Optuna studies, one per back end and workload, in a file or a shared database.

A finished measurement is added to its study as one whole trial, so a killed process leaves no half of one, and nothing is reserved by it.
"""

from __future__ import annotations

import random
import sqlite3
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import PartialFixedSampler, TPESampler
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import TrialState, create_trial
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from kvgen.errors import HostError, KvgenError, host_errors
from kvgen.extras import require
from kvgen.lower.schedule import Params, Schedule, Value
from kvgen.lower.space import SearchSpace
from kvgen.measure.measurement import Key, Measurement

RECORD = "record"
"""The attribute of a trial that holds the measurement."""
ATTEMPTS = 3
"""Processes that open a new database at once collide while they create its tables; all but one try again."""

optuna.logging.set_verbosity(optuna.logging.WARNING)
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)

StudyKey = tuple[str, str]
"""(back end, workload key)."""


class Studies:
    """The studies of one build. `records` has the last measurement of every candidate."""

    def __init__(self, storage: BaseStorage, names: Mapping[StudyKey, str], spaces: Mapping[str, SearchSpace], seed: int) -> None:
        """Studies by `names`, created where they do not exist. Raises HostError where one holds what is no measurement."""
        self.records: dict[Key, Measurement] = {}
        self._samplers = {key: TPESampler(seed=seed, multivariate=True, n_startup_trials=4) for key in names}
        self._studies = {
            key: optuna.create_study(storage=storage, study_name=name, sampler=self._samplers[key], load_if_exists=True)
            for key, name in names.items()
        }
        self._values: dict[str, dict[str, BaseDistribution]] = {
            backend: {f"{p.part}.{p.name}": CategoricalDistribution(p.values) for p in space.parameters}
            for backend, space in spaces.items()
        }
        self._seen: set[tuple[StudyKey, int]] = set()
        self.read()

    def read(self) -> list[Measurement]:
        """What was finished since the last call, by other processes too. Of several trials of a candidate the last counts."""
        news = []
        for key, study in self._studies.items():
            for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
                if RECORD in trial.user_attrs and (key, trial.number) not in self._seen:
                    self._seen.add((key, trial.number))
                    try:
                        record = Measurement.from_json(trial.user_attrs[RECORD])
                        self.records[record.candidate.key] = record
                    except (ValueError, AssertionError) as error:
                        what = f"trial {trial.number} of the study {study.study_name} holds no measurement ({error})"
                        raise HostError(f"{what}: delete the study or its file, and its measurements are taken anew") from error
                    news.append(record)
        return news

    def finish(self, record: Measurement) -> None:
        """Store a measurement. A failure is a pruned trial: the sampler learns from it."""
        candidate = record.candidate
        state = TrialState.COMPLETE if record.timed else TrialState.PRUNED
        trial = create_trial(
            state=state, value=record.cost if record.timed else None, params=flatten(candidate.schedule),
            distributions=self._values[candidate.backend], user_attrs={RECORD: record.to_json()},
        )  # fmt: skip
        self._studies[candidate.backend, candidate.workload.key].add_trial(trial)
        self.records[candidate.key] = record

    def suggest(self, key: StudyKey, layout: Params) -> Schedule:
        """What Optuna's sampler suggests over a layout. It may violate constraints."""
        study = self._studies[key]
        study.sampler = PartialFixedSampler({f"layout.{name}": value for name, value in layout.items()}, self._samplers[key])
        trial = study.ask(self._values[key[0]])
        study.tell(trial, state=TrialState.FAIL)
        return unflatten(key[0], trial.params)


def flatten(schedule: Schedule) -> dict[str, Value]:
    """Parameters of a schedule by name; the prefixes `layout.` and `launch.` distinguish the two parts."""
    return {**{f"layout.{k}": v for k, v in schedule.layout.items()}, **{f"launch.{k}": v for k, v in schedule.launch.items()}}


def unflatten(backend: str, params: Mapping[str, Value]) -> Schedule:
    """Inverse of `flatten`."""

    def part(prefix: str) -> Params:
        return Params({name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)})

    return Schedule(backend, part("layout."), part("launch."))


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
