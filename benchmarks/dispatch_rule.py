"""How well a dispatch table serves calls between its cells, from the tables that ship and what gpu_plane.py measured: no GPU takes part.

    python -m benchmarks.dispatch_rule

Over the *cells* of a table, each rested one that has another one within a doubling is left out in turn, and the launch that the rest of
the table gives for it is compared with the fastest one of the table there. Over the *points* between the cells, the same with the whole
table and the rested rows that gpu_plane.py measured on the entry's GPU, if they are of the launches that ship. The rules: the launch that
serves the nearest cell; the least mean loss; the least mean loss with the model of waves, which `kvgen/spec/dispatch.py` has; the same with
u = .5, as docs/decisions/0037 had it. All of them are among the workloads of the call's kind. The last one is among both kinds.

Over the points that gpu_plane.py measured of entries without a table, with the defaults beside them (h100_beside_tuned.csv), the rules are
the nearest cell, and the model of waves with different guesses of the loss for each doubling of distance. The rows are of all these entries
together.

Writes dispatch_rule.csv to $OUT or benchmarks/results, and prints it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import parser
from benchmarks.figures import Row, rows
from benchmarks.output import folder, write_csv
from kvgen.registry import packaged_store
from kvgen.registry.default import with_defaults
from kvgen.registry.dispatch import DispatchTable
from kvgen.registry.entry import Entry
from kvgen.spec import dispatch
from kvgen.spec.dispatch import UNFILLED, Dispatch, Measured
from kvgen.spec.distance import mean_length
from kvgen.spec.waves import Waves

GUESSES = (0.02, 0.1, 0.3)
"""Losses for each doubling that are compared."""
PLANE_FILES = ("h200_plane.csv", "h100_plane.csv")
"""What gpu_plane.py measured of the entries that ship, by GPU."""
BESIDE = "h100_beside_tuned.csv"
"""The same of entries without a table, with the defaults beside them."""
Rule = Callable[[Sequence[Measured]], Dispatch]
"""A look-up over measured workloads."""


class HalfUnfilled(Dispatch):
    """A look-up that counts half of what the model of waves says."""

    def _unfilled(self, launch: int, shape: tuple[int, int]) -> float:
        return super()._unfilled(launch, shape) * 0.5 / UNFILLED


class BothKinds(HalfUnfilled):
    """A look-up in which workloads of equal and of unequal lengths count alike, too."""

    def _away(self, batch: int, bound: int, q_len: int, tokens: int | None, *, equal: bool) -> list[tuple[float, bool]]:
        del equal
        return self._distances(batch, bound, q_len, tokens)


def rules(table: DispatchTable) -> dict[str, Rule]:
    """The rules that are compared, by name."""

    def least_loss(measured: Sequence[Measured], waves: Mapping[int, Waves] | None = None, look_up: type[Dispatch] = Dispatch) -> Dispatch:
        return look_up(measured, table.default, waves=waves)

    return {
        "nearest cell": lambda measured: least_loss([one._replace(losses=()) for one in measured]),
        "least mean loss": least_loss,
        "with waves": lambda measured: least_loss(measured, table.filling),
        "with waves, u = .5": lambda measured: least_loss(measured, table.filling, HalfUnfilled),
        "u = .5, both kinds": lambda measured: least_loss(measured, table.filling, BothKinds),
    }


def compared(entry: Entry, measured: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """A row for each rule, over the cells and over the points: number of these, worst regret and where, geometric mean. A point counts as
    often as it was measured.
    """
    table = entry.dispatch
    assert table is not None
    points = [row for row in of_entry(entry, measured) if row["traffic"] == "rested"]
    for name, rule in rules(table).items():
        for over, found in (("cells", _over_cells(entry, rule)), ("points", _over_points(rule(entry.measured()), points))):
            if regrets := list(found):
                what = {"entry": entry.spec.name, "device": entry.device["name"], "over": over, "rule": name}
                yield {**what, **_worst_and_mean(regrets)}


def of_defaults(entries: Sequence[Entry], measured: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """A row for each rule, over the points of all entries that have defaults beside them."""
    served = {entry.spec.name: with_defaults(entry) for entry in entries}
    points = {name: [row for row in measured if row["spec"] == name] for name in served}

    def row(name: str, rule: Callable[[Entry], Dispatch]) -> dict[str, Any]:
        regrets = [one for spec, entry in served.items() for one in _over_points(rule(entry), points[spec])]
        return {
            "entry": "with defaults beside",
            "device": measured[0]["device"],
            "over": "points",
            "rule": name,
            **_worst_and_mean(regrets),
        }

    def look_up(entry: Entry, *, waves: bool) -> Dispatch:
        table = entry.dispatch
        assert table is not None
        return Dispatch(entry.measured(), table.default, waves=table.filling if waves else None)

    yield row("nearest cell", partial(look_up, waves=False))
    for guessed in GUESSES:
        with patch.object(dispatch, "GUESSED", guessed):
            yield row(f"with waves, {guessed:g} per doubling", partial(look_up, waves=True))


def _worst_and_mean(regrets: Sequence[tuple[str, float]]) -> dict[str, Any]:
    at, worst = max(regrets, key=lambda one: one[1])
    mean = math.exp(sum(math.log(regret) for _, regret in regrets) / len(regrets))
    return {"number": len(regrets), "worst_regret": round(worst, 3), "worst_at": at, "geometric_mean": round(mean, 4)}


def of_entry(entry: Entry, measured: Sequence[Row]) -> list[Row]:
    """The rows that are of an entry's GPU and launches: none if another launch was the fastest of the entry's own. Where the search space
    took part, the fastest one may be any.
    """
    known = {str(entry.schedule(launch)) for launch in entry.every_launch}
    mine = [row for row in measured if row["spec"] == entry.spec.name and row["device"] == entry.device["name"]]
    return mine if all(row["best_launch"] in known or row["whole"] == "True" for row in mine) else []


def _over_cells(entry: Entry, rule: Rule) -> Iterator[tuple[str, float]]:
    """By name of a cell that was left out, the regret of the launch that the others give."""
    table = entry.dispatch
    assert table is not None
    rested = [one for one in entry.measured() if one.workload.load == "rested"]
    for cell in table.cells:
        work = cell.work
        look_up = rule([one for one in rested if one.workload.key != cell.workload])
        call = (work.batch, work.kv_len, work.q_len, round(work.batch * mean_length(work)))
        us = table.time(cell, look_up.launch(*call))
        if work.load == "rested" and us is not None and look_up.cell(*call) is not None:
            yield cell.workload, us / min(us for us in cell.us if us is not None)


def _over_points(look_up: Dispatch, points: Sequence[Row]) -> Iterator[tuple[str, float]]:
    """By name of a point, the regret of the launch that a look-up gives."""
    for row in points:
        times = json.loads(row["own_us"])
        us = times[look_up.launch(int(row["batch"]), int(row["longest"]), 1, int(row["tokens"]))]
        yield row["point"], us / min(time for time in times if time is not None)


def main() -> int:
    """Print and write the rows."""
    parser(__doc__).parse_args()
    every = [found.entry for found in packaged_store().all() if found.entry is not None]
    measured, beside = [row for name in PLANE_FILES for row in rows(name)], [row for row in rows(BESIDE) if row["rule"] == "full waves"]
    found = [row for entry in every if entry.dispatch is not None for row in compared(entry, measured)]
    found += of_defaults([entry for entry in every if entry.spec.name in {row["spec"] for row in beside} and not entry.dispatch], beside)
    for row in found:
        where, worst = f"{row['number']:4} {row['over']:7}", f"worst {row['worst_regret']:.3f} ({row['worst_at']})"
        print(f"{row['entry']:20}{row['device']:24}{row['rule']:20} at {where} {worst}, geometric mean {row['geometric_mean']:.4f}")
    write_csv(folder() / "dispatch_rule.csv", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
