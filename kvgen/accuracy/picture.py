"""Quality against size and against time, as pictures: SVG for a page, PNG for a document, light and dark."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
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
OFFSETS = (0, 8, -8, 14, -14, 22, -22, 32, -32, 44, -44)
"""Heights of a name above its point, in points of 1/72 inch, in the order in which they are tried."""

Point = tuple[float, Row]
Box = tuple[float, float, float, float]
"""Left, lower, right and upper edge in points."""


def figure(rows: Sequence[Row], theme: Theme) -> Any:
    """A matplotlib figure of the rows at the largest length: a panel per cost that any row has. Raises ToolchainMissing."""
    require("the picture of `kvgen accuracy`", "matplotlib")
    from matplotlib.figure import Figure

    shown = longest(rows)
    panels = [(title, cost) for title, cost in PANELS if any(cost(row) is not None for row in shown)]
    color = COLORS[theme]
    made = Figure(figsize=(6.6 * len(panels), 5.2), facecolor=color["ground"], layout="constrained")
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
    axes.set_xlim(least / 1.4, most * 1.5)
    ticks = [tick for tick in TICKS if least / 1.4 <= tick <= most * 1.5]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.margins(y=0.09)


def _label(axes: Any, points: Sequence[Point], best: Sequence[Row], color: dict[str, str]) -> None:
    """Names beside their points, where they cover neither points nor names."""
    unit = axes.figure.dpi / 72
    places = [tuple(value / unit for value in axes.transData.transform((paid, row.divergence))) for paid, row in points]
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in places]
    frame = axes.get_window_extent()
    left, right = frame.x0 / unit, frame.x1 / unit
    for (x, y), (paid, row) in zip(places, points, strict=True):
        width = 0.6 * FONT * len(row.name)
        boxes = [(x + dx if dx > 0 else x + dx - width, y + dy - FONT / 2) for dy in OFFSETS for dx in (8, -8)]
        inside = [box for box in boxes if left < box[0] and box[0] + width < right]
        free = [box for box in inside if not any(_overlap((*box, box[0] + width, box[1] + FONT), other) for other in taken)]
        at = (free or inside or boxes)[0]
        taken.append((*at, at[0] + width, at[1] + FONT))
        axes.annotate(
            row.name,
            (paid, row.divergence),
            xytext=(at[0] - x if at[0] > x else at[0] + width - x, at[1] - y + FONT / 2),
            textcoords="offset points",
            ha="left" if at[0] > x else "right",
            va="center",
            fontsize=FONT,
            color=color["best"] if row in best else color["ink"],
            arrowprops={"arrowstyle": "-", "color": color["mark"], "linewidth": 0.5} if abs(at[1] - y + FONT / 2) > FONT else None,
        )


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
