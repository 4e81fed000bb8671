"""Draws the pictures of the documents from benchmarks/results: time per call, and per token of a model, beside 16 bits and others.

    python -m benchmarks.picture

tests/unit/test_docs.py checks that the files agree with the results.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from markupsafe import Markup

from benchmarks import generate_picture
from kvgen.bench.results import Result, fastest_peers, read_results
from kvgen.pages import svg
from kvgen.pages.bars import ROW, Bar, bars
from kvgen.pages.numbers import count
from kvgen.pages.page import colors

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "pictures"
OURS = {"int8": "serving-kv8", "int4": "serving-kv4", "int2": "serving-kv2"}
"""Specs by the width of their codes. Peers are those of the run of int4."""
SHOWN = ((1, 32768), (8, 32768))
PANEL, MARGIN, HEAD = 410.0, 20.0, 92.0
LEGEND = ("Solid: reading the cache alone. Pale: the rest of the kernel.", "In parentheses: the fraction of that read's speed.")


def panel_rows(results: list[Result], workload: tuple[int, int]) -> list[Bar]:
    """Other libraries, the slowest first, then kvgen, the widest codes first."""
    here = [one for one in results if one.idle_rested and (one.batch, one.kv_len, one.q_len) == (*workload, 1)]
    others = fastest_peers(one for one in here if one.spec == OURS["int4"])
    ours = {one.spec: one for one in here if one.provider == "kvgen"}
    return [
        *(Bar(one.label("float16"), one.us, one.read_us) for one in others),
        *(Bar(f"kvgen {width}", ours[spec].us, ours[spec].read_us, ours=True) for width, spec in OURS.items()),
    ]


def panel(rows: list[Bar], workload: tuple[int, int], x: float, y: float) -> Markup:
    """The bars of a workload under a line that says what to see."""
    int4 = next(row for row in rows if row.name == "kvgen int4")
    fp16 = min(row.us for row in rows if row.name.endswith(" fp16"))
    batch, length = workload
    told = f"{batch} sequence{'s' * (batch > 1)} of {count(length)} tokens: int4 {fp16 / int4.us:.1f} times as fast as fp16"
    return svg.text(x, y + 12, told, class_="strong") + bars(rows, x, y + 24, PANEL)


def picture(columns: int) -> str:
    """The SVG file, with so many panels side by side."""
    results = [*read_results(RESULTS / "h200_attend.csv"), *read_results(RESULTS / "h200_flashinfer.csv")]
    panels = [(panel_rows(results, workload), workload) for workload in SHOWN]
    deep = max(len(rows) for rows, _ in panels) * ROW + 24
    lines = -(-len(panels) // columns)
    width = columns * PANEL + (columns + 1) * MARGIN
    height = HEAD + lines * (deep + MARGIN) + 22
    facts = f"{results[0].device}, {max(one.date for one in results)}. The heads of Llama-3.1-8B. Less is better."
    marks = [
        svg.rect(0, 0, width, height, "page", rx=8.0),
        svg.text(MARGIN, 32, "Time of one attention call while decoding", class_="title"),
    ]
    marks += [svg.text(MARGIN, 52 + 17 * row, told, class_="quiet") for row, told in enumerate(LEGEND)]
    for number, (rows, workload) in enumerate(panels):
        x, y = MARGIN + (number % columns) * (PANEL + MARGIN), HEAD + (number // columns) * (deep + MARGIN)
        marks.append(panel(rows, workload, x, y))
    marks.append(svg.text(MARGIN, height - 14, facts, class_="small quiet"))
    label = "; ".join(f"{row.name} at {batch} x {length}: {row.told}" for rows, (batch, length) in panels for row in rows)
    return svg.document(width, height, f"Time of one attention call. {label}", colors(), *marks)


def pictures() -> Iterator[tuple[Path, str]]:
    """The files, with what belongs into them. Calls have two panels side by side, and one above the other for narrow windows."""
    yield PICTURES / "decode.svg", picture(2)
    yield PICTURES / "decode-narrow.svg", picture(1)
    yield PICTURES / "generate.svg", generate_picture.picture(generate_picture.steps())


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for file, text in pictures():
        file.write_text(text)
