"""Stores finished measurements and suggests schedules: one Optuna study per back end and workload.

A study's name contains everything that a measurement depends on, so an interrupted run continues where it stopped and a finished
candidate is never measured again. Failed candidates are stored as pruned trials: the sampler learns from them, and they are not repeated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import optuna
from filelock import FileLock
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from kvgen.errors import HostError, host_errors
from kvgen.lower.schedule import Params, Schedule, Value
from kvgen.lower.space import SearchSpace
from kvgen.spec import AnyWorkload
from kvgen.tune.candidate import Record
from kvgen.tune.shared_storage import BEAT, Given, SharedStorage, Watch

RECORD = "record"
SUGGESTIONS = 8
"""Draws of the sampler without a new schedule before it is considered exhausted."""

optuna.logging.set_verbosity(optuna.logging.WARNING)


class _JournalLock:
    """A lock of the journal, which the operating system releases when its holder dies."""

    def __init__(self, lock: FileLock) -> None:
        self._lock = lock

    def acquire(self) -> bool:
        self._lock.acquire()
        return True

    def release(self) -> None:
        self._lock.release()


class _Journal(JournalFileBackend):
    """The file of a journal. A write that fails, on a full disk for example, leaves no part of a line to which others would be added."""

    def __init__(self, path: Path, lock: FileLock) -> None:
        super().__init__(str(path), lock_obj=cast(Any, _JournalLock(lock)))
        self._path, self._whole = path, lock

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """See `JournalFileBackend`. Raises HostError."""
        with host_errors("write the journal", self._path), self._whole:  # the same thread may take it again, as that method does
            size = self._path.stat().st_size
            try:
                super().append_logs(logs)
            except OSError:
                os.truncate(self._path, size)
                raise


def journal_storage(path: Path) -> optuna.storages.BaseStorage:
    """Storage in one file. A last line that is incomplete or damaged, by a killed process for example, is removed first.

    Raises HostError where the file cannot be opened or written, or is damaged.
    """
    with host_errors("open the journal", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_suffix(".lock"))
        with lock:
            _cut_damaged_end(path)
        try:
            return JournalStorage(_Journal(path, lock))
        except OSError:
            raise
        except Exception as error:  # what Optuna raises for a line that is no JSON, or none of its operations, depends on the line
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise HostError(f"the journal {path} is damaged ({reason}): delete it, and its measurements are taken anew", path) from error


def _cut_damaged_end(path: Path) -> None:
    """Remove the last line if it does not parse: Optuna reads past it, and fails as soon as another line follows."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        content = file.read()
        start = content.rfind(b"\n", 0, -1) + 1
        try:
            json.loads(content[start:])
            whole = content.endswith(b"\n")
        except ValueError:
            whole = False
        if content and not whole:
            file.truncate(start)


def flatten(schedule: Schedule) -> dict[str, Value]:
    """Parameters of a schedule by name; the prefixes `layout.` and `launch.` distinguish the two parts."""
    return {**{f"layout.{k}": v for k, v in schedule.layout.items()}, **{f"launch.{k}": v for k, v in schedule.launch.items()}}


def unflatten(backend: str, params: Mapping[str, Value]) -> Schedule:
    """Inverse of `flatten`."""

    def part(prefix: str) -> Params:
        return Params({name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)})

    return Schedule(backend, part("layout."), part("launch."))


class Claim(NamedTuple):
    """A running trial of this process."""

    number: int
    trial_id: int


class TrialStore:
    """The finished measurements of one back end at one workload."""

    def __init__(
        self,
        storage: optuna.storages.BaseStorage,
        name: str,
        space: SearchSpace,
        workload: AnyWorkload,
        seed: int,
        *,
        exclusive: bool = True,
    ) -> None:
        """`exclusive`: no other process uses this study, so trials found running belong to a killed process."""
        self.space = space
        self.workload = workload
        self._values: dict[str, BaseDistribution] = {f"{p.part}.{p.name}": CategoricalDistribution(p.values) for p in space.parameters}
        self._sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=4)
        self._shared = storage if isinstance(storage, SharedStorage) else None
        self.study = optuna.create_study(storage=storage, study_name=name, sampler=self._sampler, load_if_exists=True)
        self._storage, self._watch = storage, Watch()
        self._open: dict[str, Claim] = {}
        self.records: dict[str, Record] = {}
        self._read: set[int] = set()
        """Numbers of the trials whose record is known."""
        if exclusive:
            self._drop_unfinished()
        self.read()

    def _drop_unfinished(self) -> None:
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self.study.tell(trial.number, state=TrialState.FAIL)

    def read(self) -> list[Record]:
        """Read the study, with measurements of other hosts, and return the new records. Raises HostError for one that is damaged.

        The last trial of a schedule counts: a module that fails after all is told in a trial of its own.
        """
        fresh = []
        for trial in self.study.get_trials(deepcopy=False):
            data = trial.user_attrs.get(RECORD)
            if data is not None and trial.state.is_finished() and trial.number not in self._read:
                record = self._record(trial.number, data)
                self.records[record.candidate.schedule.id] = record
                self._read.add(trial.number)
                fresh.append(record)
        return fresh

    def _record(self, number: int, data: Any) -> Record:
        try:
            return Record.from_json(data)
        except (ValueError, TypeError) as error:
            what = f"trial {number} of the study {self.study.study_name} holds no measurement ({error})"
            raise HostError(f"{what}: delete the study or its journal, and its measurements are taken anew") from error

    def claimed_elsewhere(self) -> set[str]:
        """Ids of the schedules that other living processes are measuring. What a dead one had claimed may be claimed again."""
        others = self._others()
        lapsed = self._watch.lapsed(others) if self._shared is not None else set()
        for number in lapsed:
            self._end(number, None, TrialState.FAIL)
        return {self._id(trial) for trial in others if trial.number not in lapsed}

    def claim(self, schedule: Schedule) -> bool:
        """Mark a schedule as being measured; False if another process was first, or has measured it already."""
        if schedule.id in self._open:
            return True
        if self._shared is None:
            self._open[schedule.id] = self._ask(flatten(schedule))
            return True
        study_id = self._shared.get_study_id_from_name(self.study.study_name)
        claim = create_trial(state=TrialState.RUNNING, params=flatten(schedule), distributions=self._values, user_attrs={BEAT: 0})
        # The trial has its parameters from the start. If two processes claim a schedule, the one with the lower trial number has it.
        trial_id = self._shared.create_new_trial(study_id, claim)
        number = self._shared.get_trial(trial_id).number
        self._open[schedule.id] = Claim(number, trial_id)
        self._shared.keep(trial_id)
        same = (trial for trial in self.study.get_trials(deepcopy=False) if trial.number != number and self._id(trial) == schedule.id)
        if any(RECORD in trial.user_attrs or (trial.state == TrialState.RUNNING and trial.number < number) for trial in same):
            self.release(schedule)
            return False
        return True

    def _others(self) -> list[FrozenTrial]:
        """The running trials of other processes."""
        mine = {claim.number for claim in self._open.values()}
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return [trial for trial in running if trial.number not in mine]

    def _id(self, trial: FrozenTrial) -> str:
        return unflatten(self.space.backend, trial.params).id

    def _ask(self, given: Mapping[str, Value]) -> Claim:
        """A running trial with these parameters, and the sampler's for the others."""
        self.study.sampler = Given(self._sampler, dict(given))
        trial = self.study.ask(self._values)
        return Claim(trial.number, trial._trial_id)

    def _tell(self, claim: Claim, value: float | None, state: TrialState) -> None:
        """End a trial, unless another process took this one for dead and ended it."""
        if self._shared is not None:
            self._shared.drop(claim.trial_id)
        self._end(claim.number, value, state)

    def _end(self, number: int, value: float | None, state: TrialState) -> None:
        with suppress(RuntimeError):  # another process ended it at this moment
            self.study.tell(number, value, state, skip_if_finished=True)

    def suggest(self, layout: Params) -> Schedule | None:
        """A new schedule over the layout that the sampler expects to be good; None if it finds none."""
        for _ in range(SUGGESTIONS):
            drawn = self._ask({f"layout.{name}": value for name, value in layout.items()})
            schedule = unflatten(self.space.backend, self._storage.get_trial(drawn.trial_id).params)
            new = schedule.id not in self.records and schedule.id not in self._open and not self.space.doubts(schedule, self.workload)
            if new and self._shared is None:
                self._open[schedule.id] = drawn
                return schedule
            self._tell(drawn, None, TrialState.FAIL)
            if new:
                return schedule
        return None

    def release(self, schedule: Schedule) -> None:
        """Release a claimed schedule that was not measured."""
        claim = self._open.pop(schedule.id, None)
        if claim is not None:
            self._tell(claim, None, TrialState.FAIL)

    def close(self) -> None:
        """Release all claimed schedules."""
        for claim in self._open.values():
            self._tell(claim, None, TrialState.FAIL)
        self._open.clear()

    def finish(self, record: Record) -> None:
        """Store a finished measurement."""
        schedule = record.candidate.schedule
        if schedule.id not in self._open:
            self._open[schedule.id] = self._ask(flatten(schedule))
        try:
            self._storage.set_trial_user_attr(self._open[schedule.id].trial_id, RECORD, record.to_json())
        except RuntimeError:  # another process took this one for dead and ended the trial: it was cut off, or suspended
            del self._open[schedule.id]
            self._open[schedule.id] = self._ask(flatten(schedule))
            self._storage.set_trial_user_attr(self._open[schedule.id].trial_id, RECORD, record.to_json())
        claim = self._open.pop(schedule.id)
        self._read.add(claim.number)
        self._tell(claim, record.cost if record.ok else None, TrialState.COMPLETE if record.ok else TrialState.PRUNED)
        self.records[schedule.id] = record
