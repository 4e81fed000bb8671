"""Where the GPU benchmarks put their rows."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_rows(name: str, rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """Rows, each with the run's facts, as NAME.csv in $OUT or benchmarks/results."""
    out = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *facts], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **facts} for row in rows)
