"""The page of `kvgen report`: one HTML file of tables and pictures, without scripts and without the network."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvgen import _resources, results
from kvgen.results import factor, fraction, microseconds
from kvgen.spec import KernelSpec

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from kvgen.registry.entry import Entry
    from kvgen.registry.store import Found
    from kvgen.toolchain import ArtifactCache

TEMPLATE = "report/report.html.jinja"
OURS, OTHERS, INK = "#1f77d0", "#7a8594", "#010203"
"""Colours of marks, and the one that stands for the reader's own colour of text."""
WORST = 4.0
"""Trials that take more than so many times the best are drawn at the upper edge."""


def render(found: Sequence[Found], cache: ArtifactCache | None = None) -> str:
    """The page about good entries. Raises ToolchainMissing without matplotlib or Optuna."""
    import jinja2
    from markupsafe import Markup

    from kvgen import __version__
    from kvgen.extras import require

    require("kvgen report", "optuna", "matplotlib")
    launches = results.entries(list(found))
    sections = []
    for entry in {one.key: one.entry for one in found if one.entry is not None}.values():
        mine, trials = launches[launches.key == entry.key].drop_duplicates("workload"), results.trials(entry.key, cache)
        sections.append({
            "entry": entry,
            "launches": mine.assign(gain=mine.default_us / mine.us).to_dict("records"),
            "times": [(work, Markup(svg(times(entry, one)))) for work, one in mine[mine.us.notna()].groupby("workload", sort=False)],
            "searches": [
                (work, len(one), int((one.kind != "ok").sum()), Markup(svg(course(one)))) for work, one in trials.groupby("workload")
            ],
            "importances": results.importances(entry.key, cache).to_dict("records"),
            "failures": results.failures(trials).to_dict("records"),
        })  # fmt: skip
    sections.sort(key=lambda one: (str(one["entry"].device.get("name", "")), one["entry"].spec.name, one["entry"].key))
    loader = jinja2.FileSystemLoader(_resources.templates())
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    for name, written in (("us", microseconds), ("fraction", fraction), ("factor", factor)):
        environment.filters[name] = lambda value, written=written: "–" if _missing(value) else written(value).replace(" ", "\u00a0")
    return environment.get_template(TEMPLATE).render(sections=sections, version=__version__, worst=f"{WORST:g}")


def times(entry: Entry, launch: pd.DataFrame) -> Figure:
    """Bars of one workload: ours and the default; solid is what reading the bytes takes."""
    one = launch.iloc[0]
    bars: list[tuple[str, float, float]] = [(f"kvgen {one.backend}", one.us, one.read_us), ("default", one.default_us, one.read_us)]
    bars.append(("pure read" if isinstance(entry.spec, KernelSpec) else "copy", one.read_us, one.read_us))
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
        color = (OURS, "#b4690e", OTHERS)[min(number, 2)]
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
