"""The table and the pictures as one HTML page, which needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from kvgen.accuracy.orders import orders
from kvgen.accuracy.picture import svg
from kvgen.accuracy.row import Row, longest
from kvgen.extras import require
from kvgen.pages.page import render

TEMPLATE = "report/accuracy.html.jinja"


def page(rows: Sequence[Row], facts: Mapping[str, Any]) -> str:
    """HTML of a table with its facts. Raises ToolchainMissing where matplotlib, which draws the pictures, is not installed."""
    require("the page of `kvgen accuracy`", "matplotlib")
    return render(
        TEMPLATE,
        rows=sorted(longest(rows), key=lambda row: row.divergence),
        every=rows,
        lengths=sorted({row.length for row in rows}),
        names=list(dict.fromkeys(row.name for row in rows)),
        orders=orders(rows),
        facts=facts,
        light=_embedded(svg(rows, "light")),
        dark=_embedded(svg(rows, "dark")),
    )


def _embedded(picture: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(picture.encode()).decode()}"
