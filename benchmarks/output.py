"""Where the benchmarks put what they measured, and what a table says of its machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgen._nvml import gpu_identity
from kvgen.csvfile import CsvFile
from kvgen.registry.paths import slug

if TYPE_CHECKING:
    from kvgen.measure.job import TimingPolicy

RESULTS = Path(__file__).parent / "results"


def folder() -> Path:
    """$OUT, or benchmarks/results."""
    return Path(os.environ.get("OUT") or RESULTS)


def gpu_word() -> str:
    """The visible GPU in a word: `h100` for an NVIDIA H100 80GB HBM3; `gpu`, if there is none."""
    words = slug(gpu_identity().get("name", "")).split("-")
    return next((word for word in words if any(map(str.isdigit, word))), "gpu")


def of_gpu(what: str) -> str:
    """The name of results of the visible GPU, for which docstrings write GPU_WHAT: `h100_plan` for `plan`."""
    return f"{gpu_word()}_{what}"


def gpu_facts(policy: TimingPolicy, *without: str) -> dict[str, Any]:
    """Columns that say on which GPU, with which versions, how and when rows were measured."""
    from kvgen.cli.bench import facts

    return {name: fact for name, fact in facts("sm90", policy).items() if name not in ("threads", *without)}


def write_rows(name: str, rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """Rows, each with the run's facts, as NAME.csv in `folder()`."""
    write_csv(folder() / f"{name}.csv", [{**row, **facts} for row in rows])


def write_csv(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace a file by rows of the same names as CSV: a reader finds all the old rows or all of these. Without any it stays as it is."""
    if rows:
        part = file.with_name(f"{file.name}.part")
        CsvFile(part).add(rows)
        part.replace(file)
