"""Quality against size and against time, as pictures: SVG for a page, PNG for a document, light and dark."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations, pairwise
from math import hypot
from pathlib import Path
from random import Random
from typing import Any, Literal

from kvgen.accuracy.pareto import bits, front, step_us
from kvgen.accuracy.row import Row, longest
from kvgen.errors import host_errors
from kvgen.extras import require

Theme = Literal["light", "dark"]

COLORS: dict[Theme, dict[str, str]] = {
    "light": {"ground": "#ffffff", "ink": "#1c1c1c", "faint": "#d5d9e0", "mark": "#8a94a6", "best": "#1f5fc4"},
    "dark": {"ground": "#16181d", "ink": "#e6e6e6", "faint": "#383d47", "mark": "#8a94a6", "best": "#7fb0ff"},
}
PANELS: tuple[tuple[str, Callable[[Row], float | None]], ...] = (
    ("bits per element of K and V, with all scales", bits),
    ("time of a step at 8 × 32768 tokens, µs", step_us),
)
QUALITY = "divergence of predictions, nats per token"
TICKS = (2, 2.5, 3, 4, 5, 6, 8, 10, 16, 20, 30, 40, 50, 60, 80, 100, 150, 200, 300)
FONT = 8.5
OFFSETS = tuple(
    (side * dx, dy)
    for dy in (0, *(sign * 6.0 * step for step in range(1, 9) for sign in (1, -1)))
    for dx in (8.0, 18.0, 32.0)
    for side in (1, -1)
)
"""Places of a name beside its point, in points of 1/72 inch: its nearer end and the middle of its height."""

Point = tuple[float, Row]
Place = tuple[float, float]
Box = tuple[float, float, float, float]
"""Left, lower, right and upper edge in points."""


def figure(rows: Sequence[Row], theme: Theme) -> Any:
    """A matplotlib figure of the rows at the largest length: a panel per cost that any row has. Raises ToolchainMissing."""
    require("the picture of `kvgen accuracy`", "matplotlib")
    from matplotlib.figure import Figure

    shown = longest(rows)
    panels = [(title, cost) for title, cost in PANELS if any(cost(row) is not None for row in shown)]
    color = COLORS[theme]
    made = Figure(figsize=(6.6 * len(panels), 5.6), facecolor=color["ground"], layout="constrained")
    every = made.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (title, cost) in zip(every, panels, strict=True):
        _style(axes, title, color)
        _draw(axes, [(paid, row) for row in shown if (paid := cost(row)) is not None], front(shown, cost), color)
    every[0].set_ylabel(QUALITY, color=color["ink"])
    made.draw_without_rendering()  # the layout decides where points lie, and labels follow them
    for axes, (_, cost) in zip(every, panels, strict=True):
        _label(axes, [(paid, row) for row in shown if (paid := cost(row)) is not None], front(shown, cost), color)
    return made


def _style(axes: Any, title: str, color: dict[str, str]) -> None:
    axes.set_facecolor(color["ground"])
    axes.set_yscale("log")
    axes.set_xscale("log", base=2)
    axes.set_xlabel(title, color=color["ink"])
    axes.tick_params(which="both", colors=color["ink"])
    axes.grid(which="major", color=color["faint"], linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(color["faint"])


def _draw(axes: Any, points: Sequence[Point], best: Sequence[Row], color: dict[str, str]) -> None:
    """The points with their standard errors, and the line through the front."""
    line = [(paid, row.divergence) for row in best for paid, other in points if other is row]
    axes.plot(*zip(*line, strict=True), color=color["best"], linewidth=1.2, zorder=2)
    for paid, row in points:
        shade = color["best"] if row in best else color["mark"]
        axes.errorbar(paid, row.divergence, yerr=row.divergence_error, fmt="o", color=shade, markersize=5, elinewidth=1, zorder=3)
    least, most = min(paid for paid, _ in points), max(paid for paid, _ in points)
    axes.set_xlim(least / 1.6, most * 1.5)
    ticks = [tick for tick in TICKS if least / 1.6 <= tick <= most * 1.5]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.margins(y=0.09)


def _label(axes: Any, points: Sequence[Point], best: Sequence[Row], color: dict[str, str]) -> None:
    """Names beside their points; a thin line leads to one that is not at its point's height."""
    unit = axes.figure.dpi / 72
    names = [row.name for _, row in points]
    marks = [tuple(value / unit for value in axes.transData.transform((paid, row.divergence))) for paid, row in points]
    line = [mark for other in best for mark, (_, row) in zip(marks, points, strict=True) if row is other]
    frame = axes.get_window_extent()
    places = _places(names, marks, line, (frame.x0 / unit, frame.y0 / unit, frame.x1 / unit, frame.y1 / unit))
    for (dx, dy), (paid, row) in zip(places, points, strict=True):
        axes.annotate(
            row.name,
            (paid, row.divergence),
            xytext=(dx, dy),
            textcoords="offset points",
            ha="left" if dx > 0 else "right",
            va="center",
            fontsize=FONT,
            color=color["best"] if row in best else color["ink"],
            arrowprops={"arrowstyle": "-", "color": color["mark"], "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3} if dy else None,
        )


def _places(names: Sequence[str], marks: Sequence[Place], line: Sequence[Place], frame: Box) -> list[Place]:
    """The offsets of names from their points that cover least of points, lines and other names, and are the nearest then.

    Names are moved one after another, three times each, in several orders: where that ends depends on the order.
    """
    ink = [place for start, end in pairwise(line) for place in _between(start, end)]
    dots = [(x - 5, y - 5, x + 5, y + 5) for x, y in marks]
    every = [[_Label(name, mark, offset) for offset in OFFSETS] for name, mark in zip(names, marks, strict=True)]
    own = [
        {label: label.alone(frame, ink, dots, [dot for other, dot in enumerate(dots) if other != at]) for label in labels}
        for at, labels in enumerate(every)
    ]
    free = [sorted(costs, key=costs.__getitem__)[:24] for costs in own]
    beside = cache(lambda one, other: one.beside(other))
    draw, found = Random(0), []  # the same picture for the same rows
    for _ in range(12):
        chosen, order = [labels[0] for labels in free], list(range(len(names)))
        draw.shuffle(order)
        for at in order * 3:
            others = [label for other, label in enumerate(chosen) if other != at]
            chosen[at] = min(free[at], key=lambda label: own[at][label] + sum(beside(label, other) for other in others))
        alone = sum(own[at][label] for at, label in enumerate(chosen))
        found.append((alone + sum(beside(*pair) for pair in combinations(chosen, 2)), chosen))
    return [label.offset for label in min(found, key=lambda one: one[0])[1]]


class _Label:
    """A name at one offset from its point: what it covers, and the line that leads to it."""

    def __init__(self, name: str, mark: Place, offset: Place) -> None:
        width, x, y = 0.56 * FONT * len(name), mark[0] + offset[0], mark[1] + offset[1]
        self.offset = offset
        self.box = (x if offset[0] > 0 else x - width, y - 0.6 * FONT, x + width if offset[0] > 0 else x, y + 0.6 * FONT)
        self.leader = _between(mark, (x, y)) if offset[1] else []

    def alone(self, frame: Box, ink: Sequence[Place], dots: Sequence[Box], others: Sequence[Box]) -> float:
        """What the place costs whatever the other names do. `others` are the dots of other points."""
        inside = frame[0] < self.box[0] and self.box[2] < frame[2] and frame[1] < self.box[1] and self.box[3] < frame[3]
        covered = sum(_overlap(self.box, dot) for dot in dots)
        crossed = sum(_within(place, self.box) for place in ink) + sum(_within(place, dot) for place in self.leader for dot in others)
        return 1000 * (not inside) + 100 * covered + 30 * crossed + hypot(*self.offset)

    def beside(self, other: _Label) -> float:
        """What it costs beside another name."""
        crossed = sum(_within(place, other.box) for place in self.leader) + sum(_within(place, self.box) for place in other.leader)
        return 100 * _overlap(self.box, other.box) + 30 * crossed


def _between(start: Place, end: Place) -> list[Place]:
    """Places on a line, 2 points of 1/72 inch apart."""
    count = max(1, int(hypot(end[0] - start[0], end[1] - start[1]) / 2))
    return [tuple(a + (b - a) * step / count for a, b in zip(start, end, strict=True)) for step in range(1, count)]  # type: ignore[misc]


def _within(place: Place, box: Box) -> bool:
    return box[0] < place[0] < box[2] and box[1] < place[1] < box[3]


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def svg(rows: Sequence[Row], theme: Theme) -> str:
    """The picture as SVG, the same bytes for the same rows."""
    import matplotlib as mpl

    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvgen", "font.family": "sans-serif"}):
        figure(rows, theme).savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def write_pngs(file: Path, rows: Sequence[Row]) -> list[Path]:
    """The picture on a light ground in FILE, on a dark one in FILE with `-dark` in its name. Raises HostError, ToolchainMissing."""
    files: dict[Theme, Path] = {"light": file, "dark": file.with_stem(f"{file.stem}-dark")}
    for theme, place in files.items():
        made = figure(rows, theme)
        with host_errors("write", place):
            made.savefig(place, format="png", dpi=144)
    return list(files.values())
