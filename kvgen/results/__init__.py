"""pandas frames of what is registered and was measured, for notebooks and `kvgen report`; and numbers as tables and charts show them.
Times are in µs per call.

import kvgen.results as results

entries = results.entries()
trials = results.trials(entries.key[0])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from kvgen.registry.store import Found
    from kvgen.toolchain import ArtifactCache

PAUSE_S = 600.0
"""Trials that ended farther apart belong to two builds, and the time between them to neither."""
FEWEST_TRIALS = 8
"""Least number of successful trials of a study for which importances are computed."""


def entries(found: list[Found] | None = None) -> pd.DataFrame:
    """Launches of registered entries (of `found`, by default of all registries), a row for each workload that one was tuned for.

    Columns: key, registry, spec, backend, arch, device, date, workload, launch (its parameters); us, default_us (the default schedule
    in the same run), read_us (the read roofline; of an operation on a matrix a copy), read_fraction (read_us / us), watts, clock_mhz.
    What was not measured is NaN. Damaged entries are left out.
    """
    import pandas as pd

    from kvgen.registry import stores

    rows: list[dict[str, Any]] = []
    for one in [one for store in stores() for one in store.all()] if found is None else found:
        if (entry := one.entry) is None:
            continue
        about = {"key": entry.key, "registry": one.store, "spec": entry.spec.name, "arch": entry.arch}
        about |= {"device": str(entry.device.get("name", "")), "date": str(entry.provenance.get("date", ""))[:10]}
        for work, launch in entry.tuned:
            timing = entry.timing(work)
            row: dict[str, Any] = {**about, "backend": launch.backend, "workload": work.key, "launch": str(launch.params)}
            if timing is not None:
                row |= {"us": timing.us, "default_us": timing.default_us, "read_us": timing.read_us, "read_fraction": timing.read_fraction}
                row |= {"watts": timing.watts, "clock_mhz": timing.clock_mhz}
            rows.append(row)
    numbers = ["us", "default_us", "read_us", "read_fraction", "watts", "clock_mhz"]
    words = ["key", "registry", "spec", "backend", "arch", "device", "date", "workload", "launch"]
    frame = pd.DataFrame(rows, columns=[*words, *numbers])
    return frame.astype(dict.fromkeys(numbers, float))


def trials(key: str, cache: ArtifactCache | None = None) -> pd.DataFrame:
    """The trials of the searches that led to an entry, in the order of time; empty if their studies are not in this machine's cache.

    Columns: backend, workload, seconds (of the search, when the trial ended, without the pauses between builds), kind (`ok`, or how it
    failed), us (NaN of a failure), read_us, detail, candidate, module (sha256); then the parameters, as `layout.block` and
    `launch.splits`. Of several studies of one back end and workload, which differ in what was compiled, it is the latest.
    """
    import pandas as pd

    from kvgen.tune.storage import flatten

    rows: list[dict[str, Any]] = []
    for _, measured in _studies(key, cache):
        for ended, one in measured:
            candidate = one.candidate
            rows.append({
                "backend": candidate.backend, "workload": candidate.workload.key, "seconds": ended.timestamp(), "kind": one.kind,
                "us": one.us if one.ok else None, "read_us": one.read_us, "detail": one.detail.strip(), "candidate": str(candidate),
                "module": one.module, **flatten(candidate.schedule),
            })  # fmt: skip
    columns = ["backend", "workload", "seconds", "kind", "us", "read_us", "detail", "candidate", "module"]
    frame = pd.DataFrame(rows, columns=None if rows else columns).sort_values("seconds", ignore_index=True)
    if rows:
        gaps = frame.seconds.diff().fillna(0.0)
        frame["seconds"] = gaps.where(gaps <= PAUSE_S, 0.0).cumsum()
    return frame.astype({"us": float, "read_us": float})


def importances(key: str, cache: ArtifactCache | None = None) -> pd.DataFrame:
    """Share of the variance of times that each parameter explains (Optuna's PED-ANOVA), of the studies with 8 successes or more.

    Columns: backend, workload, parameter, share; of each study the largest share first.
    """
    import optuna
    import pandas as pd

    rows = []
    for study, measured in _studies(key, cache):
        if sum(one.timed for _, one in measured) >= FEWEST_TRIALS:
            found = optuna.importance.get_param_importances(study, evaluator=optuna.importance.PedAnovaImportanceEvaluator())
            first = measured[0][1].candidate
            rows += [(first.backend, first.workload.key, name, share) for name, share in found.items() if share > 0]
    return pd.DataFrame(rows, columns=["backend", "workload", "parameter", "share"])


def failures(trials: pd.DataFrame) -> pd.DataFrame:
    """Failed trials that differ in numbers alone, together, the most frequent first: backend, kind, count, example, detail."""
    failed = trials[trials.kind != "ok"]
    alike = failed.detail.str.replace(r"[\d.]+(?:e[-+]\d+)?|0x[\da-f]+", "0", regex=True).rename("alike")
    groups = failed.groupby(["backend", "kind", alike], sort=False)
    frame = groups.agg(count=("detail", "size"), example=("candidate", "first"), detail=("detail", "first"))
    return frame.sort_values("count", ascending=False, kind="stable").reset_index().drop(columns="alike")


def _studies(key: str, cache: ArtifactCache | None) -> list[tuple[Any, list[tuple[Any, Any]]]]:
    """(Optuna study, [(when it ended, measurement)]) of a key's studies, the latest of each back end and workload."""
    import optuna

    from kvgen.measure.measurement import Measurement
    from kvgen.toolchain import ArtifactCache
    from kvgen.tune.storage import RECORD, open_file

    file = (cache or ArtifactCache()).root / "studies" / f"{key}.db"
    if not file.exists():
        return []
    storage, latest = open_file(file), dict[tuple[str, str], tuple[Any, list[tuple[Any, Any]]]]()
    for name in optuna.get_all_study_names(storage):
        study = optuna.load_study(study_name=name, storage=storage)
        finished: list[Any] = [trial for trial in study.get_trials(deepcopy=False) if RECORD in trial.user_attrs]
        finished.sort(key=lambda trial: trial.datetime_complete)
        try:
            measured = [(trial.datetime_complete, Measurement.from_json(trial.user_attrs[RECORD])) for trial in finished]
            place = [(one.candidate.backend, one.candidate.workload.key) for _, one in measured]
        except (ValueError, AssertionError):  # another version of kvgen wrote them
            continue
        if measured and (place[0] not in latest or latest[place[0]][1][-1][0] < measured[-1][0]):
            latest[place[0]] = study, measured
    return list(latest.values())


# --- numbers with their units ----------------------------------------------------------------------------------------------


def microseconds(value: float | None) -> str:
    """A time in µs with three figures and a unit that reads well; a dash for None."""
    if value is None:
        return "–"
    unit, size = ("s", 1e6) if value >= 999_500 else ("ms", 1e3) if value >= 999.5 else ("µs", 1.0)
    return f"{value / size:.3g} {unit}"


def fraction(value: float | None) -> str:
    """A fraction of the read roofline: two digits, without the zero before the point; a dash for None."""
    return "–" if value is None else f"{value:.2f}".removeprefix("0")


def factor(value: float | None) -> str:
    """How many times as much; a dash for None."""
    return "–" if value is None else f"{value:.3g}×" if value >= 10 else f"{value:.2f}×"
