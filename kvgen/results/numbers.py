"""Numbers with their units, as tables and charts show them."""

from __future__ import annotations


def microseconds(value: float | None) -> str:
    """A time in µs with three figures and a unit that reads well; a dash for None."""
    if value is None:
        return "–"
    unit, size = ("s", 1e6) if value >= 999_500 else ("ms", 1e3) if value >= 999.5 else ("µs", 1.0)
    return f"{value / size:.3g} {unit}"


def fraction(value: float | None) -> str:
    """A fraction of the read roofline: two digits, without the zero before the point; a dash for None."""
    return "–" if value is None else f"{value:.2f}".removeprefix("0")


def factor(value: float | None) -> str:
    """How many times as much; a dash for None."""
    return "–" if value is None else f"{value:.3g}×" if value >= 10 else f"{value:.2f}×"


def count(value: int) -> str:
    """A number of tokens in units of 1024 or 1024², where it is a multiple: 32K."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if value and value % size == 0:
            return f"{value // size}{unit}"
    return f"{value}"
