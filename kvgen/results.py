"""pandas frames of what is registered and was measured, for notebooks; the page of `kvgen report`, one HTML file of tables and pictures
that needs no network; and numbers as both show them. Times are in µs per call.

import kvgen.results as results

entries = results.entries()
trials = results.trials(entries.key[0])
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvgen import _resources

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from kvgen.registry.entry import Entry
    from kvgen.registry.store import Found
    from kvgen.toolchain import ArtifactCache

PAUSE_S = 600.0
"""Trials that ended farther apart belong to two builds, and the time between them to neither."""
TEMPLATE = "report/report.html.jinja"
OURS, OTHERS, INK = "#1f77d0", "#7a8594", "#010203"
"""Colours of marks, and the one that stands for the reader's own colour of text."""
COLORS = (OURS, "#b4690e", "#2e8b57", OTHERS)
"""Of back ends and devices."""
WORST = 4.0
"""Trials that take more than so many times the best are drawn at the upper edge."""


def entries(found: list[Found] | None = None) -> pd.DataFrame:
    """Launches of registered entries (of `found`, by default of all registries), a row for each workload that one was tuned for.

    Columns: key, registry, spec, backend, arch, device, date, version (of kvgen), made (tuned, compiled, measured under disturbances),
    workload, launch (its parameters); us, spread (of the samples, over us), default_us (the default schedule in the same run), read_us (the
    read roofline; of an operation on a matrix a copy), read_fraction (read_us / us), bytes (that a call of attention reads), watts,
    clock_mhz. What was not measured is NaN. Damaged entries are left out.
    """
    import pandas as pd

    from kvgen.format.sizes import must_read, timed_lengths
    from kvgen.lower.schedule import layout_of
    from kvgen.registry import stores
    from kvgen.registry.select import stale
    from kvgen.spec import KernelSpec, Workload
    from kvgen.spec.workloads import spread

    rows: list[dict[str, Any]] = []
    for one in [one for store in stores() for one in store.all()] if found is None else found:
        if (entry := one.entry) is None:
            continue
        about = {"key": entry.key, "registry": one.store, "spec": entry.spec.name, "arch": entry.arch}
        about |= {"device": str(entry.device.get("name", "")), "date": str(entry.provenance.get("date", ""))[:10]}
        about |= {"version": str(entry.provenance.get("kvgen", "")), "made": entry.made}
        for work, launch in entry.tuned:
            timing = entry.timing(work)
            row: dict[str, Any] = {**about, "backend": launch.backend, "workload": work.key, "launch": str(launch.params)}
            if timing is not None:
                row |= {"us": timing.us, "default_us": timing.default_us, "read_us": timing.read_us, "read_fraction": timing.read_fraction}
                row |= {"watts": timing.watts, "clock_mhz": timing.clock_mhz, "spread": spread(timing.samples) if timing.samples else None}
            if isinstance(entry.spec, KernelSpec) and isinstance(work, Workload) and stale(entry, entry.arch) is None:
                layout = layout_of(entry.spec, entry.layout)
                row["bytes"] = must_read(entry.spec, layout, timed_lengths(entry.spec, layout, work))
            rows.append(row)
    numbers = ["us", "spread", "default_us", "read_us", "read_fraction", "bytes", "watts", "clock_mhz"]
    words = ["key", "registry", "spec", "backend", "arch", "device", "date", "version", "made", "workload", "launch"]
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
    for measured in _studies(key, cache):
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


def failures(trials: pd.DataFrame) -> pd.DataFrame:
    """Failed trials that differ in numbers alone, together, the most frequent first: backend, kind, count, example, detail."""
    failed = trials[trials.kind != "ok"]
    alike = failed.detail.str.replace(r"[\d.]+(?:e[-+]\d+)?|0x[\da-f]+", "0", regex=True).rename("alike")
    groups = failed.groupby(["backend", "kind", alike], sort=False)
    frame = groups.agg(count=("detail", "size"), example=("candidate", "first"), detail=("detail", "first"))
    return frame.sort_values("count", ascending=False, kind="stable").reset_index().drop(columns="alike")


def _studies(key: str, cache: ArtifactCache | None) -> list[list[tuple[Any, Any]]]:
    """[(when a trial ended, its measurement)] of each of a key's studies, the latest of each back end and workload."""
    import optuna

    from kvgen.measure.measurement import Measurement
    from kvgen.toolchain import ArtifactCache
    from kvgen.tune.storage import RECORD, open_file, storage_errors

    file = (cache or ArtifactCache()).root / "studies" / f"{key}.db"
    if not file.exists():
        return []
    storage, latest = open_file(file), dict[tuple[str, str], list[tuple[Any, Any]]]()
    with storage_errors(file):
        studies = [optuna.load_study(study_name=name, storage=storage) for name in optuna.get_all_study_names(storage)]
        trials_of = [study.get_trials(deepcopy=False) for study in studies]
    for found in trials_of:
        finished: list[Any] = [trial for trial in found if RECORD in trial.user_attrs]
        finished.sort(key=lambda trial: trial.datetime_complete)
        try:
            measured = [(trial.datetime_complete, Measurement.from_json(trial.user_attrs[RECORD])) for trial in finished]
            place = [(one.candidate.backend, one.candidate.workload.key) for _, one in measured]
        except (ValueError, AssertionError):  # another version of kvgen wrote them
            continue
        if measured and (place[0] not in latest or latest[place[0]][-1][0] < measured[-1][0]):
            latest[place[0]] = measured
    return list(latest.values())


# --- the page of `kvgen report` ----------------------------------------------------------------------------------------------


def render(found: Sequence[Found], cache: ArtifactCache | None = None) -> str:
    """The page about good entries. Raises ToolchainMissing without matplotlib or Optuna."""
    import jinja2
    from markupsafe import Markup

    from kvgen import __version__
    from kvgen.extras import require

    require("kvgen report", "matplotlib")
    launches = entries(list(found))
    sections = []
    for entry in {one.key: one.entry for one in found if one.entry is not None}.values():
        mine, tried = launches[launches.key == entry.key].drop_duplicates("workload", keep="last"), trials(entry.key, cache)
        sections.append({
            "entry": entry,
            "times": [(work, Markup(svg(times(entry, one)))) for work, one in mine[mine.us.notna()].groupby("workload", sort=False)],
            "searches": [
                (work, len(one), int((one.kind != "ok").sum()), Markup(svg(course(one)))) for work, one in tried.groupby("workload")
            ],
            "failures": failures(tried).to_dict("records"),
        })  # fmt: skip
    sections.sort(key=lambda one: (str(one["entry"].device.get("name", "")), one["entry"].spec.name, one["entry"].key))
    launches = launches.drop_duplicates(["key", "workload"], keep="last").assign(gain=launches.default_us / launches.us)
    devices = sorted(launches.device.unique())
    number = launches.groupby(["spec", "workload", "device"]).cumcount()  # of a device's entries for a workload
    side_by_side = [
        (spec, work, [next(iter(group[group.device == device].to_dict("records")), None) for device in devices])
        for (spec, work, _), group in launches.groupby(["spec", "workload", number], sort=False)
    ]
    fleet = [
        (spec, [group[group.device == device].drop_duplicates("key").to_dict("records") for device in devices])
        for spec, group in launches.groupby("spec", sort=False)
    ]
    drawn = launches[launches.bytes.notna() & launches.us.notna()]
    limit = Markup(svg(roofline(drawn))) if len(drawn) else None
    loader = jinja2.FileSystemLoader(_resources.templates())
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    for name, written in (("us", microseconds), ("fraction", fraction), ("factor", factor), ("percent", "{:.1%}".format)):
        environment.filters[name] = lambda value, written=written: "–" if _missing(value) else written(value).replace(" ", "\u00a0")
    page = {"devices": devices, "side_by_side": side_by_side, "fleet": fleet, "roofline": limit, "sections": sections}
    return environment.get_template(TEMPLATE).render(**page, version=__version__, worst=f"{WORST:g}")


def roofline(launches: pd.DataFrame) -> Figure:
    """Bytes per second of calls of attention over their bytes: a dot for each, and a line for a pure read, in a colour for each device."""
    figure, axes = _figure(2.6)
    for number, (device, one) in enumerate(launches.sort_values("bytes").groupby("device")):
        color = COLORS[number % len(COLORS)]
        read = one[one.read_us.notna()]
        axes.plot(read.bytes, read.bytes / read.read_us / 1e6, color=color, lw=0.8, alpha=0.6)
        axes.scatter(one.bytes, one.bytes / one.us / 1e6, s=9, color=color, label=device)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(lambda size, _: f"{size / 1e9:g} GB" if size >= 1e9 else f"{size / 1e6:g} MB")
    axes.xaxis.set_minor_formatter("")
    axes.yaxis.set_major_formatter(lambda speed, _: f"{speed:g} TB/s" if axes.get_ylim()[1] >= 1 else f"{1e3 * speed:g} GB/s")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, labelcolor=INK, fontsize=8)
    return figure


def times(entry: Entry, launch: pd.DataFrame) -> Figure:
    """Bars of one workload: ours and the default; solid is what reading the bytes takes."""
    from kvgen.spec import MatrixSpec

    one = launch.iloc[0]
    bars: list[tuple[str, float, float]] = [(f"kvgen {one.backend}", one.us, one.read_us), ("default", one.default_us, one.read_us)]
    bars.append(("copy" if isinstance(entry.spec, MatrixSpec) else "pure read", one.read_us, one.read_us))
    bars = [bar for bar in bars if not _missing(bar[1])]
    figure, axes = _figure(0.26 * len(bars) + 0.1)
    for place, (_, us, read) in enumerate(bars):
        color, solid = OURS if place == 0 else OTHERS, 0.0 if _missing(read) else min(read, us)
        axes.barh(place, us, color=color, alpha=0.35)
        axes.barh(place, solid, color=color)
        axes.text(us, place, f" {microseconds(us)}" + (f" ({fraction(read / us)})" if solid else ""), va="center", color=INK, fontsize=8)
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * max(us for _, us, _ in bars))
    axes.xaxis.set_visible(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def course(trials: pd.DataFrame) -> Figure:
    """The best of every back end's search at one workload over its time, in steps, and a dot for each trial."""
    figure, axes = _figure(1.9)
    good = trials[trials.us.notna()]
    for number, (backend, one) in enumerate(good.groupby("backend")):
        best = one.us.cummin()
        color = COLORS[number % len(COLORS)]
        axes.step(one.seconds, best, where="post", color=color, label=f"{backend} {microseconds(best.iloc[-1])}")
        axes.scatter(one.seconds, one.us.clip(upper=WORST * good.us.min()), s=6, color=color, alpha=0.35)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda us, _: microseconds(us))
    axes.yaxis.set_minor_formatter(lambda us, _: microseconds(us) if f"{us:e}"[0] in "25" else "")
    axes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds:g} s")
    axes.spines[["top", "right"]].set_visible(False)
    if len(good):
        axes.legend(frameon=False, labelcolor=INK, fontsize=8)
    return figure


def svg(figure: Figure) -> str:
    """A picture to stand in a page, whose colour of text it takes."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvgen"}):
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", transparent=True)
    text = drawn.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>| xmlns(:\w+)?=\"[^\"]*\"|<!--.*?-->", "", text[text.index("<svg") :], flags=re.DOTALL)
    return text.replace(INK, "currentColor")


def _figure(height: float) -> tuple[Figure, Any]:
    """A figure and its axes, 4.2 inches wide."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    ink: Any = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    with mpl.rc_context({**ink, "font.size": 8, "font.family": "sans-serif"}):
        figure = Figure(figsize=(4.2, height), layout="constrained")
        return figure, figure.subplots()


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


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
