"""The comparison of look-up rules over the tables that ship."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks import dispatch_rule
from benchmarks.dispatch_rule import compared, rules
from benchmarks.figures import rows
from kvgen.registry import packaged_store
from kvgen.registry.dispatch import Cell, DispatchTable
from kvgen.spec.waves import Waves

TABLE = DispatchTable(
    (), 0, (0, 1), (Cell("4x4096", 0, (1.0, 2.0), 1.0), Cell("8x4096", 1, (3.0, 1.0), 1.0), Cell("8x4096:sustained", 1, (3.0, 1.0), 1.0))
)
ENTRY = SimpleNamespace(dispatch=TABLE, measured=TABLE.measured)


def test_a_cell_that_is_left_out_does_not_serve_itself():
    assert dict(dispatch_rule._over_cells(ENTRY, rules(TABLE)["least mean loss"])) == {"4x4096": 2.0, "8x4096": 3.0}


def test_between_the_cells_the_whole_table_serves():
    point = {"batch": "8", "longest": "5000", "tokens": "40000", "point": "8x5000", "own_us": "[6.0, 4.0, null]"}
    assert dict(dispatch_rule._over_points(rules(TABLE)["least mean loss"](ENTRY.measured()), [point])) == {"8x5000": 1.0}
    assert dict(dispatch_rule._over_points(rules(TABLE)["least mean loss"](ENTRY.measured()), [{**point, "batch": "4"}])) == {"8x5000": 1.5}


def test_every_table_that_ships_is_compared_by_all_rules_over_its_cells_and_the_points_that_were_measured():
    entries = [found.entry for found in packaged_store().all() if found.entry is not None and found.entry.spec.name == "serving-kv4"]
    entry = next(entry for entry in entries if entry.device["name"] == "NVIDIA H200")
    found = list(compared(entry, rows("h200_plane.csv")))
    assert [(row["rule"], row["over"]) for row in found] == [(rule, over) for rule in rules(entry.dispatch) for over in ("cells", "points")]
    assert all(row["number"] > 20 and row["worst_regret"] >= row["geometric_mean"] >= 1 for row in found)
    assert found[1]["number"] == sum((row["spec"], row["traffic"]) == ("serving-kv4", "rested") for row in rows("h200_plane.csv"))
    other = [{**row, "best_launch": "another one"} for row in rows("h200_plane.csv")]
    assert {row["over"] for row in compared(entry, other)} == {"cells"}
    elsewhere = [{**row, "device": "another GPU"} for row in rows("h200_plane.csv")]
    assert {row["over"] for row in compared(entry, elsewhere)} == {"cells"}


def test_the_look_up_of_before_counts_both_kinds_and_less_of_an_empty_wave():
    table = DispatchTable((), 0, (0, 1), (Cell("8x2048", 0, (1.0, 1.5), 1.0), Cell("8x256-16384", 1, (1.5, 1.0), 1.0)))
    now, before = (rules(table)[name](table.measured()) for name in ("with waves", "u = .5, both kinds"))
    assert now.launch(8, 2500, tokens=8 * 2500 - 1) == 1
    assert before.launch(8, 2500, tokens=8 * 2500 - 1) == 0
    waves = {0: Waves(heads=8, resident=7, ctas_per_sm=1, step_tokens=128, tile_bytes=17408, most_waves=1)}
    half, whole = (look_up([], 0, waves=waves)._unfilled(0, (1, 2048)) for look_up in (dispatch_rule.HalfUnfilled, dispatch_rule.Dispatch))
    assert half == pytest.approx(whole * 0.5 / 0.6)
    assert whole > 0
