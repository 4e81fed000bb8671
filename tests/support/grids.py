"""Entries whose dispatch tables are invented."""

from __future__ import annotations

from typing import Any

from kvgen.registry.entry import Entry


def cell(workload: str, launch: int, us: list[float | None], best_us: float, **more: Any) -> dict[str, Any]:
    """A measured workload of a grid, as an entry has it."""
    return {"workload": workload, "launch": launch, "us": us, "best_us": best_us, "read_us": 6.0, "watts": None, "clock_mhz": None, **more}


def with_grid(entry: Entry, *measured: dict[str, Any], skipped: dict[str, str] | None = None) -> Entry:
    """The entry with a dispatch table over its first two launches."""
    table = {"launches": [], "default": 0, "members": [0, 1], "cells": list(measured), "skipped": skipped or {}, "worst_regret": None}
    return with_table(entry, table)


def with_table(entry: Entry, table: dict[str, Any] | None) -> Entry:
    """The entry with this dispatch table, or without one."""
    texts = {file: code.text for file, code in entry.codes.items()}
    return Entry.from_parts({**entry.to_json(), "dispatch": table}, texts, entry.resources())
