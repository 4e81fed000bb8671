"""A grid of numbers, each in a colour that says in which class it falls."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from kvgen.pages import svg
from kvgen.pages.numbers import count

CELL_WIDTH, CELL_HEIGHT, LEFT, TOP = 30.0, 22.0, 40.0, 20.0
LEAST_WIDTH = 260.0
"""Of the chart, which the names of its axes need."""

Place = tuple[int, int]
"""(column, row), as the numbers that name them."""


@dataclass(frozen=True)
class Colors:
    """Six classes, divided by five increasing bounds; a value at a bound is in the class above it.

    `ramp` is one of colors.css: b where more is better, w where more is worse, c where numbers are names.
    """

    ramp: str
    bounds: tuple[float, float, float, float, float]
    write: Callable[[float], str]

    def group(self, value: float) -> int:
        """The class of a value as it is written, so that equal numbers have one colour."""
        return bisect_right(self.bounds, round(value, 2))


def heat_map(
    columns: Sequence[int],
    rows: Sequence[int],
    values: Mapping[Place, float],
    colors: Colors,
    label: str,
    *,
    across: str,
    down: str,
    hints: Mapping[Place, str],
    marked: frozenset[Place] = frozenset(),
) -> Markup:
    """The grid, the smallest row at the bottom; a place without a value is empty. `hints` are tooltips, `marked` cells have an edge.

    `across` and `down` name what columns and rows count.
    """
    width, grid = max(LEFT + len(columns) * CELL_WIDTH + 2, LEAST_WIDTH), TOP + len(rows) * CELL_HEIGHT
    marks = [svg.text(0, 11, f"{down} ↓", class_="small quiet"), svg.text(width, 11, f"{across} →", "end", class_="small quiet")]
    for number, row in enumerate(sorted(rows, reverse=True)):
        y = TOP + number * CELL_HEIGHT
        marks.append(svg.text(LEFT - 6, y + 15, count(row), "end", class_="small quiet"))
        marks += [
            _cell(LEFT + place * CELL_WIDTH, y, values[column, row], colors, hints.get((column, row), ""), (column, row) in marked)
            for place, column in enumerate(columns)
            if (column, row) in values
        ]
    marks += [
        svg.text(LEFT + (place + 0.5) * CELL_WIDTH, grid + 14, count(column), "middle", class_="small quiet")
        for place, column in enumerate(columns)
    ]
    return svg.figure(width, grid + 20, label, *marks)


def _cell(x: float, y: float, value: float, colors: Colors, hint: str, marked: bool) -> Markup:
    group = colors.group(value)
    gap = 0.75
    return svg.element(
        "g",
        svg.tooltip(hint),
        svg.rect(x + gap, y + gap, CELL_WIDTH - 2 * gap, CELL_HEIGHT - 2 * gap, f"{colors.ramp}{group}", rx=2.0),
        svg.rect(x + 2, y + 2, CELL_WIDTH - 4, CELL_HEIGHT - 4, "edge", rx=1.0) if marked else Markup(""),
        svg.text(x + CELL_WIDTH / 2, y + 15, colors.write(value), "middle", class_="tiny" if colors.ramp == "c" else f"tiny on{group}"),
    )
