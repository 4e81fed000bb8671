"""Looks up the measured points of shipped entries again, after the look-up of launches or a dispatch table has changed: no GPU takes part.

    python -m benchmarks.plane_look_up

A row has the times of all launches of its entry, which were taken in turns. So what a call takes by today's look-up, and what that loses,
follows without a measurement. Rows of launches that do not ship stay as they are. Watts and clocks are of the launch that served when the
row was measured; they are dropped where another one serves now. Writes h200_plane.csv and h100_plane.csv to $OUT or benchmarks/results, and
prints the rows that changed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import parser
from benchmarks.dispatch_rule import PLANE_FILES, of_entry
from benchmarks.figures import Row, rows
from benchmarks.gpu_plane import under
from benchmarks.output import folder, write_csv
from kvgen.registry import packaged_store
from kvgen.spec.dispatch import Dispatch

LookUps = Mapping[str, Dispatch]
"""Of one entry, by the load of the traffic."""


def looked_up(row: Row, look_ups: LookUps) -> Row:
    """The row with the launches that calls take now."""
    times = json.loads(row["own_us"])
    call = (int(row["batch"]), int(row["longest"]), 1)
    serving = look_ups[row["traffic"]].launch(*call, int(row["tokens"]))
    us = times[serving]
    changed: Row = {
        "launch": str(serving), "us": str(us), "regret_own": _ratio(us, row["best_own_us"]), "regret": _ratio(us, row["best_us"]),
        "read_fraction": _ratio(float(row["read_us"]), us),
    }  # fmt: skip
    if row["launch_unknown"]:
        unknown = look_ups[row["traffic"]].launch(*call)
        changed |= {"launch_unknown": str(unknown), "regret_unknown": _ratio(times[unknown], row["best_us"])}
    if us != float(row["us"]):
        changed |= {"watts": "", "clock_mhz": ""}
    return {**row, **changed}


def _ratio(one: float, other: str | float) -> str:
    return str(round(one / float(other), 4))


def main() -> int:
    """Print what changed, and write all rows."""
    parser(__doc__).parse_args()
    entries = [found.entry for found in packaged_store().all() if found.entry is not None and found.entry.dispatch is not None]
    for name in PLANE_FILES:
        measured = rows(name)
        look_ups = {
            entry.spec.name: {load: entry.look_up(under(entry.spec, load)) for load in ("rested", "sustained")}
            for entry in entries
            if of_entry(entry, measured)
        }
        found = [looked_up(row, look_ups[row["spec"]]) if row["spec"] in look_ups else row for row in measured]
        for row, again in zip(measured, found, strict=True):
            if again["launch"] != row["launch"]:
                print(f"{row['spec']:20}{row['point']:26}{row['traffic']:10} regret {row['regret_own']} -> {again['regret_own']}")
        write_csv(folder() / name, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
