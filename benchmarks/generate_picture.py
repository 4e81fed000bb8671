"""The picture of `gpu_generate`'s results: time per token of a decoding model, beside 16 bits in the same loop."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvgen.pages import svg
from kvgen.pages.bars import ROW, Bar, bars
from kvgen.pages.numbers import count, microseconds
from kvgen.pages.page import colors

FILE = Path(__file__).resolve().parent / "results" / "h200_generate.csv"
RIVAL, STOCK = "graph16", ("dynamic", "static", "quantized")
PANEL, MARGIN, HEAD, CAPTION = 560.0, 20.0, 110.0, 36.0
LEGEND = (
    "Llama-3.1-8B's shape with random weights, compiled, one CUDA graph per step. Less is better.",
    "Solid: reading the weights and the cache once. Pale: the rest of the step.",
    "In parentheses: the fraction of that read's speed.",
)


@dataclass(frozen=True)
class Step:
    """A row of the results with a time."""

    loop: str
    batch: int
    tokens: int
    ms: float
    bytes_ms: float
    date: str
    device: str

    @property
    def per_token(self) -> float:
        """µs per generated token."""
        return self.ms * 1e3 / self.batch

    def bar(self, batch: bool) -> Bar:
        """As a bar; `batch`: with its batch in its name."""
        name = "16 bits" if self.loop == RIVAL else f"kvgen {self.loop.replace(':equal', ', equal')}"
        return Bar(f"{name}, batch {self.batch}" if batch else name, self.per_token, self.bytes_ms * 1e3 / self.batch, self.loop != RIVAL)


def steps(file: Path = FILE) -> list[Step]:
    """The rows of the results that have a time."""
    with file.open(newline="") as lines:
        return [
            Step(row["loop"], int(row["batch"]), int(row["tokens"]), float(row["ms"]), float(row["bytes_ms"]), row["date"], row["device"])
            for row in csv.DictReader(lines)
            if row["ms"]
        ]


def panels(found: Sequence[Step]) -> list[tuple[str, list[Bar], str]]:
    """Title, bars and caption of each case; the last one shows each format at its own largest batch, if these were measured."""
    rivals = [one for one in found if one.loop == RIVAL]
    largest = [one for one in found if one.batch not in {rival.batch for rival in rivals}]
    return [_panel(rival, found, largest if rival is rivals[-1] else []) for rival in rivals]


def _panel(rival: Step, found: Sequence[Step], largest: Sequence[Step]) -> tuple[str, list[Bar], str]:
    here = [one for one in found if (one.batch, one.tokens) == (rival.batch, rival.tokens)]
    each = largest or [one for one in here if one.loop not in (*STOCK, RIVAL)]
    ratio = rival.per_token / next(one.per_token for one in each if one.loop == "int4")
    tokens = f"{count(rival.tokens)} tokens"
    where = f"The largest batch of {tokens} that fits" if largest else f"{rival.batch} sequence{'s' * (rival.batch > 1)} of {tokens}"
    rows = [one.bar(bool(largest)) for one in sorted([rival, *each], key=lambda one: -one.per_token)]
    stock = ", ".join(f"{one.loop} {microseconds(one.per_token)}" for one in here if one.loop in STOCK)
    return f"{where}: int4 {ratio:.2f} times as fast as 16 bits", rows, f"transformers' caches without a graph: {stock}" if stock else ""


def picture(found: Sequence[Step]) -> str:
    """The SVG file: one panel above the other."""
    width, y, marks, told = PANEL + 2 * MARGIN, HEAD, [], []
    for title, rows, caption in panels(found):
        marks += [svg.text(MARGIN, y + 12, title, class_="strong"), bars(rows, MARGIN, y + 24, PANEL, names=156)]
        told += [f"{title}. {'; '.join(f'{row.name}: {row.told}' for row in rows)}"]
        y += len(rows) * ROW + 24
        if caption:
            marks.append(svg.text(MARGIN, y + 14, caption, class_="small quiet"))
        y += CAPTION
    height = y + 14
    head = [svg.rect(0, 0, width, height, "page", rx=8.0), svg.text(MARGIN, 32, "Time per token of a decoding model", class_="title")]
    head += [svg.text(MARGIN, 54 + 17 * number, line, class_="quiet") for number, line in enumerate(LEGEND)]
    facts = f"{found[0].device}, {max(one.date for one in found)}"
    marks.append(svg.text(MARGIN, height - 14, facts, class_="small quiet"))
    return svg.document(width, height, f"Time per token. {'. '.join(told)}", colors(), *head, *marks)
