"""The best result of a search so far, over its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from markupsafe import Markup

from kvgen.pages import svg
from kvgen.pages.numbers import microseconds

WIDTH, HEIGHT = 340.0, 170.0
LEFT, RIGHT, TOP, BOTTOM = 56.0, 100.0, 10.0, 24.0
WORST = 4.0
"""Results that take more than so many times the best are drawn at the upper edge."""


@dataclass(frozen=True)
class Course:
    """One search: seconds since its start and result in µs of every success, in order of time."""

    name: str
    points: tuple[tuple[float, float], ...]


def course_chart(courses: Sequence[Course], label: str) -> Markup:
    """A step line per search, which falls to its best, and a dot per result; both axes with units, the time of a result logarithmic."""
    results = [us for course in courses for _, us in course.points]
    low, high = min(results) / 1.04, min(max(*results, 1.2 * min(results)), WORST * min(results))
    until = max(1.0, *(moment for course in courses for moment, _ in course.points))
    across = svg.linear((0.0, until), (LEFT, WIDTH - RIGHT))
    place = svg.logarithmic((low, high), (HEIGHT - BOTTOM, TOP))
    marks = [*_axes(across, place, (low, high), until)]
    ends = _apart([place(min(us for _, us in course.points)) + 4 for course in courses], 14.0)
    for number, (course, end) in enumerate(zip(courses, ends, strict=True)):
        marks += _course(course, min(number, 2), across, lambda us: place(min(us, high)), end)
    return svg.figure(WIDTH, HEIGHT, label, *marks)


def _axes(across: svg.Scale, place: svg.Scale, span: tuple[float, float], until: float) -> list[Markup]:
    right, marks = WIDTH - RIGHT, []
    levels = svg.log_ticks(*span)
    for us in levels if len(levels) > 2 else svg.ticks(*span, most=6):
        marks += [
            svg.line(LEFT, place(us), right, place(us), "rule"),
            svg.text(LEFT - 6, place(us) + 4, microseconds(us), "end", class_="small quiet"),
        ]
    unit, size = next((unit, size) for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0)) if until >= 2 * size or size == 1.0)
    marks += [
        svg.text(across(size * tick), HEIGHT - BOTTOM + 16, f"{tick:g} {unit}" if tick else "0", "middle", class_="small quiet")
        for tick in svg.ticks(0.0, until / size, most=5)
    ]
    return marks


def _course(course: Course, color: int, across: svg.Scale, place: svg.Scale, end: float) -> list[Markup]:
    best = list(accumulate((us for _, us in course.points), min))
    path = f"M{across(course.points[0][0]):.1f} {place(best[0]):.1f}"
    path += "".join(f"H{across(moment):.1f}V{place(us):.1f}" for (moment, _), us in zip(course.points[1:], best[1:], strict=True))
    path += f"H{WIDTH - RIGHT:.1f}"
    dots = [
        svg.element("circle", svg.tooltip(microseconds(us)), cx=across(moment), cy=place(us), r=2.2, class_=f"d{color} point")
        for moment, us in course.points
    ]
    told = svg.text(WIDTH - RIGHT + 6, end, f"{course.name} {microseconds(best[-1])}", class_=f"d{color} small")
    return [*dots, svg.element("path", d=path, class_=f"course s{color}"), told]


def _apart(places: Sequence[float], least: float) -> list[float]:
    """The places, in the same order, moved down until neighbours are `least` apart."""
    moved, lowest = {}, -1e9
    for index in sorted(range(len(places)), key=lambda index: places[index]):
        moved[index] = lowest = max(places[index], lowest + least)
    return [moved[index] for index in range(len(places))]
