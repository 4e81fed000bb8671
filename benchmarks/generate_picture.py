"""A picture of `gpu_generate`'s rows: tokens per second of every loop, a group of bars for each case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

WIDTH, BAR, GAP, LEFT, RIGHT = 720, 18, 26, 110, 90
OURS, OTHERS = "#2a7", "#999"
STOCK = ("dynamic", "static", "quantized", "graph16")


def picture(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write an SVG; rows without a time are left out."""
    measured = [row for row in rows if row["ms"] != ""]
    cases = list(dict.fromkeys((row["batch"], row["tokens"]) for row in measured))
    y, parts = 10, []
    for batch, tokens in cases:
        mine = [row for row in measured if (row["batch"], row["tokens"]) == (batch, tokens)]
        most = max(float(row["tokens_per_second"]) for row in mine)
        y += GAP
        parts.append(_text(10, y, f"{batch} × {tokens} tokens: tokens per second", bold=True))
        y += 8
        for row in mine:
            rate = float(row["tokens_per_second"])
            width = max(1.0, (WIDTH - LEFT - RIGHT) * rate / most)
            color = OTHERS if row["loop"] in STOCK else OURS
            parts.append(_text(10, y + BAR - 5, str(row["loop"])))
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 3}" fill="{color}"/>')
            parts.append(_text(LEFT + width + 6, y + BAR - 5, f"{rate:.0f}"))
            y += BAR
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 12}" font-family="sans-serif" font-size="12">'
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n")


def _text(x: float, y: float, words: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y}"{weight}>{escape(words)}</text>'
