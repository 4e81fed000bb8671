"""How well a dispatch table serves calls between its cells, from the tables that ship: no GPU takes part.

    python -m benchmarks.dispatch_rule

Each rested cell that has another one within a doubling is left out of its table, and the launch that the rest of the table gives for it is
compared with the fastest one of the table there. Three rules: the launch that serves the nearest cell, the least mean loss, and that with
the model of waves, which `kvgen/spec/dispatch.py` has. Cells lie a doubling or two apart, so calls are nearer to a cell than these, and
lose less.

Writes dispatch_rule.csv to $OUT or benchmarks/results, and prints it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import parser
from benchmarks.output import folder, write_csv
from kvgen.registry import packaged_store
from kvgen.registry.dispatch import Cell, DispatchTable
from kvgen.registry.entry import Entry
from kvgen.spec.dispatch import Dispatch, Measured
from kvgen.spec.distance import mean_length
from kvgen.spec.waves import Waves


def rules(entry: Entry) -> Iterator[dict[str, Any]]:
    """A row for each rule: number of cells, worst regret and where, geometric mean."""
    table = entry.dispatch
    assert table is not None
    rested = [one for one in entry.measured() if one.workload.load == "rested"]
    bare = [one._replace(losses=()) for one in rested]
    compared: dict[str, tuple[list[Measured], dict[int, Waves]]] = {
        "nearest cell": (bare, {}), "least mean loss": (rested, {}), "with waves": (rested, table.filling)
    }  # fmt: skip
    for rule, (measured, waves) in compared.items():
        found = dict(_regrets(table, measured, waves))
        worst = max(found, key=lambda name: found[name])
        mean = math.exp(sum(map(math.log, found.values())) / len(found))
        yield {
            "entry": entry.spec.name, "rule": rule, "cells": len(found), "worst_regret": round(found[worst], 3), "worst_at": worst,
            "geometric_mean": round(mean, 4),
        }  # fmt: skip


def _regrets(table: DispatchTable, measured: list[Measured], waves: Mapping[int, Waves]) -> Iterator[tuple[str, float]]:
    """By name of a cell that was left out, the regret of the launch that the others give."""
    for cell in table.cells:
        work = cell.work
        look_up = Dispatch([one for one in measured if one.workload.key != cell.workload], table.default, waves=waves)
        call = (work.batch, work.kv_len, work.q_len, round(work.batch * mean_length(work)))
        us = table.time(cell, look_up.launch(*call))
        if work.load == "rested" and us is not None and look_up.cell(*call) is not None:
            yield cell.workload, us / _fastest(cell)


def _fastest(cell: Cell) -> float:
    return min(us for us in cell.us if us is not None)


def main() -> int:
    """Print and write the rows."""
    parser(__doc__).parse_args()
    entries = [found.entry for found in packaged_store().all() if found.entry is not None and found.entry.dispatch is not None]
    rows = [row for entry in entries for row in rules(entry)]
    for row in rows:
        print(f"{row['entry']:24}{row['rule']:18}{row['cells']:4} cells  worst {row['worst_regret']:.3f} ({row['worst_at']})  "
              f"geometric mean {row['geometric_mean']:.4f}")  # fmt: skip
    write_csv(folder() / "dispatch_rule.csv", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
