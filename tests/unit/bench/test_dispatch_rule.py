"""The comparison of look-up rules over the tables that ship."""

from __future__ import annotations

from benchmarks import dispatch_rule
from benchmarks.dispatch_rule import rules
from kvgen.registry import packaged_store
from kvgen.registry.dispatch import Cell, DispatchTable


def test_a_cell_that_is_left_out_does_not_serve_itself():
    cells = (Cell("4x4096", 0, (1.0, 2.0), 1.0), Cell("8x4096", 1, (3.0, 1.0), 1.0), Cell("8x4096:sustained", 1, (3.0, 1.0), 1.0))
    table = DispatchTable((), 0, (0, 1), cells)
    assert dict(dispatch_rule._regrets(table, table.measured(), {})) == {"4x4096": 2.0, "8x4096": 1.0}


def test_every_table_that_ships_is_compared_by_all_rules():
    entry = next(found.entry for found in packaged_store().all() if found.entry is not None and found.entry.dispatch is not None)
    rows = list(rules(entry))
    assert [row["rule"] for row in rows] == ["nearest cell", "least mean loss", "with waves"]
    assert all(row["cells"] > 20 and row["worst_regret"] >= row["geometric_mean"] >= 1 for row in rows)
