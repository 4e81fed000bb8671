"""A row of the table: a format, what it takes, and what it costs."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvgen.accuracy.evaluate import Score
from kvgen.accuracy.outputs import Outputs
from kvgen.csvfile import CsvFile
from kvgen.errors import KvgenError, host_errors
from kvgen.plaindata import Json


@dataclass(frozen=True)
class Row(Json):
    """A format at one length of the model's text."""

    name: str
    bits: float
    """Per element of K and V, with all scales."""
    length: int
    """Tokens of a sequence, of the following."""
    perplexity: float
    unquantized_perplexity: float
    increase: float
    """Perplexity over the unquantized one, less 1."""
    increase_error: float
    agreement: float
    """Of the most likely tokens."""
    divergence: float
    """Of the predictions, in nats."""
    divergence_error: float
    normal_l2: float
    normal_cosine: float
    normal_weights_l1: float
    structured_l2: float
    structured_cosine: float
    structured_weights_l1: float
    kernel_error: float
    """Worst head of the kernel against the reference over the same quantized cache, relative L2."""
    step_us: float | None = None
    """Time of attention at 8 x 32768, where the format was measured on a GPU."""

    @classmethod
    def of(cls, name: str, bits: float, found: Outputs, score: Score, step_us: float | None) -> Row:
        """The row of a format at the length of a score."""
        data = {
            f"{kind}_{short}": getattr(getattr(found, kind), long)
            for kind in ("normal", "structured")
            for short, long in (("l2", "relative_l2"), ("cosine", "cosine"), ("weights_l1", "weights_l1"))
        }
        return cls(
            name,
            bits,
            score.length,
            score.perplexity,
            score.unquantized,
            score.increase,
            score.increase_error,
            score.agreement,
            score.divergence,
            score.divergence_error,
            kernel_error=found.kernel_error,
            step_us=step_us,
            **data,
        )


def longest(rows: Iterable[Row]) -> list[Row]:
    """The rows at the largest length of all."""
    every = list(rows)
    most = max((row.length for row in every), default=0)
    return [row for row in every if row.length == most]


def csv_rows(rows: Iterable[Row], facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows for a CSV file, each with the facts of the run."""
    return [{**{name: _figure(value) for name, value in row.to_json().items()}, **facts} for row in rows]


def write_csv(file: Path, rows: Sequence[Row], facts: Mapping[str, Any]) -> None:
    """Rows and facts as a CSV file. Raises HostError where the file cannot be written."""
    CsvFile(file).add(csv_rows(rows, facts))


def read_csv(file: Path) -> tuple[list[Row], dict[str, str]]:
    """Rows and facts as `write_csv` wrote them. Raises KvgenError where the file is no such table, HostError where it cannot be read."""
    try:
        with host_errors("read", file), file.open(newline="", encoding="utf-8") as text:
            found = list(csv.DictReader(text))
    except (UnicodeDecodeError, csv.Error) as error:
        raise KvgenError(f"{file} is no table of `kvgen accuracy --csv`: it is not text") from error
    try:
        rows = [Row.from_json({name: value or None for name, value in item.items()}) for item in found]
    except ValueError as error:
        raise KvgenError(f"{file} is no table of `kvgen accuracy --csv`: {error}") from error
    if not rows:
        raise KvgenError(f"{file} has no rows")
    own = {one.name for one in fields(Row)}
    return rows, {name: value for name, value in found[0].items() if name not in own}


def _figure(value: Any) -> Any:
    """Six significant digits, in which two runs agree."""
    return float(f"{value:.6g}") if isinstance(value, float) else "" if value is None else value
