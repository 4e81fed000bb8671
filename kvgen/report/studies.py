"""The searches that led to an entry, as its trial stores have them: results over time, failures, which parameters matter."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import Any

from kvgen.lower.schedule import Value
from kvgen.measure.measurement import Measurement
from kvgen.registry.entry import Entry
from kvgen.registry.facts import Failure
from kvgen.toolchain import ArtifactCache
from kvgen.tune.storage import RECORD, flatten, open_journal

FEWEST_TRIALS = 8
"""Least number of successful trials of a study for which importances are computed."""
PAUSE_SECONDS = 600.0
"""Results that lie farther apart belong to two builds, and the time between them to neither."""


@dataclass(frozen=True)
class StudyView:
    """One study: a search of one back end at one workload."""

    backend: str
    workload: str
    trials: int
    results: tuple[tuple[float, float], ...]
    """(seconds since the entry's first trial began, µs) of every success, by time. Pauses between builds are left out."""
    importances: tuple[tuple[str, float], ...]
    slices: tuple[tuple[str, tuple[tuple[str, int, float, float], ...]], ...]
    """Per parameter, per value: (value, successful trials, best µs, median µs)."""
    failures: tuple[Failure, ...]


@dataclass(frozen=True)
class _Trials:
    study: Any
    trials: Sequence[Any]
    records: Sequence[Measurement]

    @property
    def last(self) -> datetime:
        return max(_ended(trial) for trial in self.trials)


def study_views(entry: Entry, cache: ArtifactCache) -> list[StudyView]:
    """The studies that led to an entry, if their journal is in this cache.

    Of several of one back end and workload, which differ in versions of what was measured, the latest.
    """
    import optuna

    journal = cache.root / "studies" / f"{entry.key}.journal"
    if not journal.exists():
        return []
    storage = open_journal(journal)
    read = (_finished(optuna.load_study(study_name=name, storage=storage)) for name in optuna.get_all_study_names(storage))
    found = [one for one in read if one is not None]
    latest: dict[tuple[str, str], _Trials] = {}
    for one in sorted((one for one in found if one.trials), key=lambda one: one.last):
        latest[one.records[0].candidate.backend, one.records[0].candidate.workload.key] = one
    clock = _clock(trial for one in latest.values() for trial in one.trials)
    order = {launch.workload.key: place for place, launch in enumerate(entry.launches)}
    views = [_view(one, clock) for one in latest.values()]
    return sorted(views, key=lambda view: (order.get(view.workload, len(order)), view.workload, view.backend))


def _finished(study: Any) -> _Trials | None:
    """The finished trials of a study; None where another version of kvgen wrote records that this one does not read."""
    trials = sorted((t for t in study.get_trials(deepcopy=False) if RECORD in t.user_attrs and t.state.is_finished()), key=_ended)
    try:
        return _Trials(study, trials, [Measurement.from_json(trial.user_attrs[RECORD]) for trial in trials])
    except (ValueError, KeyError, TypeError):
        return None


def _ended(trial: Any) -> datetime:
    ended: datetime = trial.datetime_complete
    return ended


def _clock(trials: Iterable[Any]) -> Mapping[datetime, float]:
    """Seconds of the search at which each trial ended, without pauses."""
    found = list(trials)
    clock, now = {}, 0.0
    before = min((trial.datetime_start for trial in found), default=None)
    for moment in sorted({_ended(trial) for trial in found}):
        gap = (moment - before).total_seconds() if before else 0.0
        now += gap if gap <= PAUSE_SECONDS else 0.0
        clock[moment] = now
        before = moment
    return clock


def _view(one: _Trials, clock: Mapping[datetime, float]) -> StudyView:
    good = [(trial, record) for trial, record in zip(one.trials, one.records, strict=True) if record.timed]
    candidate = one.records[0].candidate
    return StudyView(
        candidate.backend,
        candidate.workload.key,
        len(one.trials),
        tuple((clock[_ended(trial)], record.cost) for trial, record in good),
        _importances(one.study, len(good)),
        _slices([record for _, record in good]),
        failures(one.records),
    )


def _slices(records: Sequence[Measurement]) -> tuple[tuple[str, tuple[tuple[str, int, float, float], ...]], ...]:
    times: dict[str, dict[Value, list[float]]] = {}
    for record in records:
        for name, value in flatten(record.candidate.schedule).items():
            times.setdefault(name, {}).setdefault(value, []).append(record.cost)
    return tuple(
        (
            name,
            tuple((str(value), len(us), min(us), median(us)) for value, us in sorted(by_value.items(), key=lambda item: _sorted(item[0]))),
        )
        for name, by_value in times.items()
        if len(by_value) > 1
    )


def _sorted(value: Value) -> tuple[float, str]:
    return (float(value), "") if isinstance(value, int | float) else (math.inf, str(value))


def _importances(study: Any, good: int) -> tuple[tuple[str, float], ...]:
    """Fraction of the variance of times that each parameter explains, the largest first (PED-ANOVA)."""
    if good < FEWEST_TRIALS:
        return ()
    import optuna

    found = optuna.importance.get_param_importances(study, evaluator=optuna.importance.PedAnovaImportanceEvaluator())
    return tuple((name, float(share)) for name, share in found.items() if math.isfinite(share) and share > 0)


def failures(records: Iterable[Measurement]) -> tuple[Failure, ...]:
    """Failed records by back end, by kind and by what was said, numbers in it aside; the most frequent first."""
    alike: dict[tuple[str, str, str], list[Measurement]] = {}
    for record in records:
        if not record.timed:
            said = re.sub(r"[\d.]+(e[-+]\d+)?|0x[\da-f]+", "0", record.detail.strip())
            alike.setdefault((record.candidate.backend, record.kind, said), []).append(record)
    told = [Failure(backend, kind, len(same), str(same[0].candidate), same[0].detail.strip()) for (backend, kind, _), same in alike.items()]
    return tuple(sorted(told, key=lambda failure: -failure.count))
