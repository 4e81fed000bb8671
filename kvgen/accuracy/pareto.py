"""The formats that no other one beats in both size (or time) and quality."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvgen.accuracy.row import Row


def front(rows: Iterable[Row], cost: Callable[[Row], float | None]) -> list[Row]:
    """The rows that no other has both less of the cost than and predictions nearer to the unquantized cache's; cheapest first.

    Quality is the divergence, which is known far more exactly than the rise of perplexity. Rows without the cost are left out.
    """
    known = sorted(((paid, row.divergence, row) for row in rows if (paid := cost(row)) is not None), key=lambda item: item[:2])
    found: list[Row] = []
    for _, divergence, row in known:
        if not found or divergence < found[-1].divergence:
            found.append(row)
    return found


def bits(row: Row) -> float | None:
    """Bits per element."""
    return row.bits


def step_us(row: Row) -> float | None:
    """µs of a step at 8 x 32768."""
    return row.step_us
