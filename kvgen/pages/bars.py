"""Times as bars, each with the part that reading the same bytes takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from kvgen.pages import svg
from kvgen.pages.numbers import fraction, microseconds

ROW = 24.0
THICK = 15.0


@dataclass(frozen=True)
class Bar:
    """One time in µs. `read_us` is a pure read of the same bytes; `ours` draws it in the accent colour."""

    name: str
    us: float
    read_us: float | None = None
    ours: bool = False

    @property
    def read_fraction(self) -> float | None:
        """Time of the read over the time."""
        return self.read_us / self.us if self.read_us is not None else None

    @property
    def told(self) -> str:
        """The time, and the fraction of the read roofline, as the label of the bar."""
        return microseconds(self.us) + ("" if self.read_us is None else f" ({fraction(self.read_fraction)})")


def bars(rows: Sequence[Bar], x: float, y: float, width: float, names: float = 104, values: float = 98) -> Markup:
    """Bars from the top edge y down, in the range [x, x + width]; the longest leaves `values` for its label.

    The solid part of a bar is the time of the read, the pale part what the kernel takes beyond it.
    """
    start = x + names
    length = svg.linear((0.0, max(row.us for row in rows)), (0.0, width - names - values))
    marks = []
    for number, row in enumerate(rows):
        top = y + number * ROW
        middle, kind = top + ROW / 2 + 4, "ours" if row.ours else "other"
        solid = min(row.us, row.us if row.read_us is None else row.read_us)
        marks += [
            svg.text(start - 7, middle, row.name, "end", class_="strong" if row.ours else "quiet"),
            svg.rect(start, top + (ROW - THICK) / 2, length(row.us), THICK, f"{kind}-pale", svg.tooltip(f"{row.name}: {row.told}")),
            svg.rect(start, top + (ROW - THICK) / 2, length(solid), THICK, kind),
            svg.text(start + length(row.us) + 6, middle, row.told, class_="strong" if row.ours else None),
        ]
    return Markup("").join(marks)


def bar_chart(rows: Sequence[Bar], label: str, width: float = 340) -> Markup:
    """The bars as a chart of their own."""
    return svg.figure(width, len(rows) * ROW, f"{label}: " + "; ".join(f"{row.name} {row.told}" for row in rows), bars(rows, 0, 0, width))
