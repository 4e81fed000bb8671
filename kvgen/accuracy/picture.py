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


def figure(rows: Sequence[Row], theme: Theme) -> Any:
    """A matplotlib figure of the rows at the largest length: a panel per cost that any row has. Raises ToolchainMissing."""
    require("the picture of `kvgen accuracy`", "matplotlib")
    from matplotlib.figure import Figure

    shown = longest(rows)
    panels = [(title, cost) for title, cost in PANELS if any(cost(row) is not None for row in shown)]
    color = COLORS[theme]
    made = Figure(figsize=(6.2 * len(panels), 4.8), facecolor=color["ground"], layout="constrained")
    for axes, (title, cost) in zip(made.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _style(axes, title, color)
        _draw(axes, shown, cost, color)
    return made


def _style(axes: Any, title: str, color: dict[str, str]) -> None:
    axes.set_facecolor(color["ground"])
    axes.set_yscale("log")
    axes.set_xlabel(title, color=color["ink"])
    axes.set_ylabel(QUALITY, color=color["ink"])
    axes.tick_params(which="both", colors=color["ink"])
    axes.grid(which="major", color=color["faint"], linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(color["faint"])


def _draw(axes: Any, rows: Sequence[Row], cost: Callable[[Row], float | None], color: dict[str, str]) -> None:
    best = front(rows, cost)
    axes.plot([cost(row) for row in best], [row.divergence for row in best], color=color["best"], linewidth=1.2, zorder=2)
    points = [(paid, row) for row in rows if (paid := cost(row)) is not None]
    for paid, row in points:
        shade = color["best"] if row in best else color["mark"]
        axes.errorbar(paid, row.divergence, yerr=row.divergence_error, fmt="o", color=shade, markersize=5, elinewidth=1, zorder=3)
    widest = max(paid for paid, _ in points)
    axes.set_xlim(0, widest * 1.1)
    placed: list[tuple[float, float]] = []
    for paid, row in sorted(points, key=lambda point: -point[1].divergence):
        _label(axes, row.name, paid, row.divergence, placed, color["best"] if row in best else color["ink"], left=paid > 0.7 * widest)


def _label(axes: Any, text: str, x: float, y: float, placed: list[tuple[float, float]], ink: str, *, left: bool) -> None:
    """Beside the point, and moved down by lines of text while a label that was placed already is near."""
    figure = axes.figure
    here = axes.transData.transform((x, y))
    line = 11.0 * figure.dpi / 72
    place = here[1]
    while any(abs(place - other_y) < line and abs(here[0] - other_x) < 1.6 * figure.dpi for other_x, other_y in placed):
        place -= line / 2
    placed.append((here[0], place))
    axes.annotate(
        text,
        (x, y),
        xytext=(-7 if left else 7, (place - here[1]) * 72 / figure.dpi - 3),
        textcoords="offset points",
        ha="right" if left else "left",
        fontsize=8,
        color=ink,
    )


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
