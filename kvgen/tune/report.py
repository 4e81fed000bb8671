"""The content of `kvgen report`: entries beside default and read roofline, failures, importance of parameters, course of the search."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvgen import _resources
from kvgen.registry.entry import Entry
from kvgen.toolchain import ArtifactCache
from kvgen.tune.candidate import Record
from kvgen.tune.trial_store import RECORD, journal_storage

TEMPLATE = "report/report.html.jinja"
FEWEST_TRIALS = 8
"""Least number of successful trials of a study for which importances are computed."""


@dataclass(frozen=True)
class StudyView:
    """One study: a search of one back end at one workload."""

    backend: str
    workload: str
    regret: tuple[float, ...]
    """Best time so far over the best time of all, by successful trial."""
    importances: tuple[tuple[str, float], ...]
    slices: tuple[tuple[str, tuple[tuple[str, int, float, float], ...]], ...]
    """Per parameter, per value: (value, successful trials, best µs, median µs)."""
    failures: tuple[tuple[str, int, str, str], ...]
    """(kind, count, an example, its detail)."""
    trials: int


def study_views(entry: Entry, cache: ArtifactCache) -> list[StudyView]:
    """The studies that led to an entry, if their journal is in this cache."""
    import optuna

    journal = cache.root / "studies" / f"{entry.key}.journal"
    if not journal.exists():
        return []
    storage = journal_storage(journal)
    studies = [optuna.load_study(study_name=summary, storage=storage) for summary in optuna.get_all_study_names(storage)]
    return [view for study in studies if (view := _view(study)) is not None]


def _view(study: Any) -> StudyView | None:
    import pandas as pd

    trials = [trial for trial in study.get_trials(deepcopy=False) if RECORD in trial.user_attrs]
    if not trials:
        return None
    records = [Record.from_json(trial.user_attrs[RECORD]) for trial in trials]
    frame = pd.DataFrame([{**trial.params, "us": record.us} for trial, record in zip(trials, records, strict=True) if record.ok])
    candidate = records[0].candidate
    best = frame["us"].cummin() / frame["us"].min() if len(frame) else pd.Series(dtype=float)
    return StudyView(
        candidate.schedule.backend,
        candidate.workload.key,
        tuple(float(value) for value in best),
        _importances(study, len(frame)),
        tuple((name, _slice(frame, name)) for name in frame.columns if name != "us" and frame[name].nunique() > 1),
        _failures(records),
        len(trials),
    )


def _slice(frame: Any, name: str) -> tuple[tuple[str, int, float, float], ...]:
    groups = frame.groupby(name)["us"].agg(["count", "min", "median"])
    return tuple((str(value), int(row["count"]), float(row["min"]), float(row["median"])) for value, row in groups.iterrows())


def _importances(study: Any, right: int) -> tuple[tuple[str, float], ...]:
    """Fraction of the variance of times that each parameter explains, the largest first (PED-ANOVA)."""
    if right < FEWEST_TRIALS:
        return ()
    import optuna

    found = optuna.importance.get_param_importances(study, evaluator=optuna.importance.PedAnovaImportanceEvaluator())
    return tuple((name, float(share)) for name, share in found.items() if math.isfinite(share) and share > 0)


def _failures(records: Sequence[Record]) -> tuple[tuple[str, int, str, str], ...]:
    told = []
    for kind in dict.fromkeys(record.kind for record in records if not record.ok):
        same = [record for record in records if record.kind == kind]
        told.append((kind, len(same), str(same[0].candidate.schedule), same[0].detail.strip()))
    return tuple(told)


def render(entries: Iterable[Entry], cache: ArtifactCache, accuracy: str | None = None) -> str:
    """One self-contained HTML page; `accuracy` is the address of a page of `kvgen accuracy`, which it links."""
    import jinja2

    from kvgen import __version__

    loader = jinja2.FileSystemLoader(_resources.templates())
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["us"] = lambda value: "–" if value is None else f"{value / 1000:.3g} ms" if value >= 1000 else f"{value:.3g} µs"
    pages = [{"entry": entry, "studies": study_views(entry, cache)} for entry in entries]
    return environment.get_template(TEMPLATE).render(pages=pages, version=__version__, polyline=polyline, accuracy=accuracy)


def polyline(values: Sequence[float], width: int, height: int) -> str:
    """SVG points of a falling curve of ratios >= 1, on a logarithmic scale down to 1."""
    top = math.log(max(*values, 1.01))
    step = width / max(1, len(values) - 1)
    return " ".join(f"{index * step:.1f},{height - height * math.log(max(value, 1.0)) / top:.1f}" for index, value in enumerate(values))
