"""The picture of `gpu_generate`'s results: time per token of a decoding model, beside 16 bits in the same loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.figures import rows
from kvgen.pages import svg
from kvgen.pages.bars import ROW, Bar, bars
from kvgen.pages.numbers import count, fraction
from kvgen.pages.page import colors

BASELINE, STOCK = "graph16", ("dynamic", "static", "quantized")
PANEL, MARGIN, HEAD, CAPTION = 560.0, 20.0, 110.0, 36.0
LEGEND = (
    "Time of a step divided by its batch. Llama-3.1-8B's shape with random weights, compiled,",
    "one CUDA graph per step. Less is better. Solid: reading the weights and the cache once.",
    "Pale: what a step takes beyond it. In parentheses: the solid part of the bar.",
)


@dataclass(frozen=True)
class StepBar(Bar):
    """A bar in ms, whatever its length."""

    @property
    def told(self) -> str:
        """The time, and the fraction of the read."""
        return f"{self.us / 1e3:.2f} ms ({fraction(self.read_fraction)})"


@dataclass(frozen=True)
class Step:
    """A row of the results with a time."""

    loop: str
    batch: int
    tokens: int
    ms: float
    bytes_ms: float
    """0 if it is not known."""
    dtype: str
    date: str
    device: str

    @property
    def per_token(self) -> float:
        """µs per generated token."""
        return self.ms * 1e3 / self.batch

    def bar(self, batch: bool) -> StepBar:
        """As a bar; `batch`: with its batch in its name."""
        name = "16 bits" if self.loop == BASELINE else f"kvgen {self.loop.replace(':equal', ', equal')}"
        return StepBar(
            f"{name}, batch {self.batch}" if batch else name, self.per_token, self.bytes_ms * 1e3 / self.batch, self.loop != BASELINE
        )


def steps() -> list[Step]:
    """The rows of the results that have a time."""
    return [
        Step(
            row["loop"],
            int(row["batch"]),
            int(row["tokens"]),
            float(row["ms"]),
            float(row["bytes_ms"] or 0),
            *(row[name] for name in ("dtype", "date", "device")),
        )
        for row in rows("h200_generate.csv")
        if row["ms"]
    ]


def panels(found: Sequence[Step]) -> list[tuple[str, list[StepBar], str]]:
    """Title, bars and caption of each case; the last one shows each format at its own largest batch, if these were measured."""
    baselines = [one for one in found if one.loop == BASELINE]
    largest = [one for one in found if one.batch not in {baseline.batch for baseline in baselines}]
    return [_panel(baseline, found, largest if baseline is baselines[-1] else []) for baseline in baselines]


def _panel(baseline: Step, found: Sequence[Step], largest: Sequence[Step]) -> tuple[str, list[StepBar], str]:
    here = [one for one in found if (one.batch, one.tokens) == (baseline.batch, baseline.tokens)]
    each = largest or [one for one in here if one.loop not in (*STOCK, BASELINE)]
    ratio = baseline.per_token / next(one.per_token for one in each if one.loop == "int4")
    tokens = f"{count(baseline.tokens)} tokens"
    where = f"The largest batch of {tokens} that fits" if largest else f"{baseline.batch} sequence{'s' * (baseline.batch > 1)} of {tokens}"
    shown = [one.bar(bool(largest)) for one in sorted([baseline, *each], key=lambda one: -one.per_token)]
    stock = ", ".join(f"{one.loop} {one.per_token / 1e3:.1f} ms" for one in here if one.loop in STOCK)
    return f"{where}: int4 {ratio:.2f} times as fast as 16 bits", shown, f"transformers' caches without a graph: {stock}" if stock else ""


def picture(found: Sequence[Step]) -> str:
    """The SVG file: one panel above the other."""
    width, y, marks, told = PANEL + 2 * MARGIN, HEAD, [], []
    for title, shown, caption in panels(found):
        marks += [svg.text(MARGIN, y + 12, title, class_="strong"), bars(shown, MARGIN, y + 24, PANEL, names=156)]
        told += [f"{title}. {'; '.join(f'{row.name}: {row.told}' for row in shown)}"]
        y += len(shown) * ROW + 24
        if caption:
            marks.append(svg.text(MARGIN, y + 14, caption, class_="small quiet"))
        y += CAPTION
    height = y + 14
    head = [svg.rect(0, 0, width, height, "page", rx=8.0), svg.text(MARGIN, 32, "Time per token of a decoding model", class_="title")]
    head += [svg.text(MARGIN, 54 + 17 * number, line, class_="quiet") for number, line in enumerate(LEGEND)]
    facts = f"{found[0].device}, {found[0].dtype}, {max(one.date for one in found)}: benchmarks/gpu_generate.py"
    marks.append(svg.text(MARGIN, height - 14, facts, class_="small quiet"))
    return svg.document(width, height, f"Time per token. {'. '.join(told)}", colors(), *head, *marks)
