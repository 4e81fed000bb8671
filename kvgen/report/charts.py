"""The charts of the report: what an entry's times and studies look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from kvgen.bench.results import Result, fastest_peers
from kvgen.pages import svg
from kvgen.pages.bars import Bar, bar_chart
from kvgen.pages.course import Course, course_chart
from kvgen.pages.numbers import fraction
from kvgen.registry.entry import Entry
from kvgen.report.studies import StudyView
from kvgen.spec import AnyWorkload, MatrixSpec
from kvgen.spec.timing import Timing


@dataclass(frozen=True)
class Chart:
    """A chart with its title, and a sentence that says what to see."""

    title: str
    text: str
    svg: Markup


def rooflines(entry: Entry, results: Sequence[Result]) -> list[Chart]:
    """Per measured workload: ours, the default, the other back end, other libraries, each with the read of its bytes, and our read."""
    charts = []
    roofline = "copy" if isinstance(entry.spec, MatrixSpec) else "pure read"
    for launch in entry.launches:
        timing, peers = entry.timing(launch.workload), _peers(entry, launch.workload, results)
        if timing is not None:
            read = [Bar(roofline, timing.read_us)] if timing.read_us is not None else []
            chart = bar_chart([*_own(entry, timing, launch.backend), *peers, *read], launch.workload.key)
            told = f"{peers[-1].us / timing.us:.1f} times as fast as {peers[-1].name}." if peers else ""
            charts.append(Chart(launch.workload.key.replace("x", " × ", 1), told, chart))
    return charts


def _own(entry: Entry, timing: Timing, backend: str) -> list[Bar]:
    rows = [Bar(f"kvgen {backend}", timing.us, timing.read_us, ours=True)]
    if timing.default_us is not None:
        rows.append(Bar("default", timing.default_us, timing.read_us))
    if rival := entry.rival(timing.workload):
        rows.append(Bar(f"best {rival[0]}", rival[1] * timing.us, timing.read_us))
    return rows


def _peers(entry: Entry, work: AnyWorkload, results: Sequence[Result]) -> list[Bar]:
    """The slowest first; none for operations on a matrix."""
    if isinstance(entry.spec, MatrixSpec):
        return []
    wanted = (entry.spec.name, str(entry.device.get("name")), work.key)
    here = [one for one in results if one.idle_rested and (one.spec, one.device, one.workload) == wanted]
    return [Bar(one.label(entry.spec.attention.dtype), one.us, one.read_us) for one in fastest_peers(here)]


def courses(studies: Sequence[StudyView]) -> list[Chart]:
    """Per workload: the best of every back end's search, over time."""
    charts = []
    for workload in dict.fromkeys(study.workload for study in studies):
        here = [Course(study.backend, study.results) for study in studies if study.workload == workload and study.results]
        if here:
            count = sum(study.trials for study in studies if study.workload == workload)
            failed = count - sum(len(course.points) for course in here)
            told = f"{count} candidates" + (f", {failed} of them failed." if failed else ".")
            charts.append(Chart(workload.replace("x", " × ", 1), told, course_chart(here, f"best time of the search so far at {workload}")))
    return charts


def strip(fractions: Sequence[float], width: float = 150) -> Markup:
    """Read fractions as dots on a line from 0 to 1, which is the limit."""
    place = svg.linear((0.0, 1.0), (6.0, width - 9.0))  # beyond 1 there is room for a dot
    dots = [
        svg.element("circle", svg.tooltip(fraction(one)), cx=place(min(one, 1.02)), cy=9, r=4, class_="ours point") for one in fractions
    ]
    ends = [svg.line(place(end), 3, place(end), 15, "rule") for end in (0.0, 1.0)]
    label = "read fractions " + ", ".join(map(fraction, fractions))
    return svg.element(
        "svg", svg.line(place(0), 9, place(1), 9, "rule"), *ends, *dots,
        viewBox=f"0 0 {width:.0f} 18", role="img", aria_label=label, class_="chart strip", style=f"--width:{width:.0f}px",
    )  # fmt: skip
