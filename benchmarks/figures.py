"""Rows of the committed results, and how tables of the documents show them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
WIDTH = 130
"""Characters of a line of prose in the documents."""
Row = dict[str, str]


def rows(name: str) -> list[Row]:
    """The rows of a CSV file of results."""
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def table(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def figure(value: float) -> str:
    """Three significant digits, as many as a time is good for."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
