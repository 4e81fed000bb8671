"""The winners that ship: whole, listed, and rendered again byte for byte from what they say."""

from __future__ import annotations

import pytest

from kvgen._resources import generated
from kvgen.lower.backends import get_backend
from kvgen.registry import packaged_store
from kvgen.registry.default import with_defaults
from kvgen.registry.manifest import manifest_problems
from kvgen.spec import KernelSpec
from kvgen.spec.distance import mean_length
from tests.support.tilelang import needs_tilelang

SHIPPED = packaged_store().all()


def test_the_manifest_lists_what_ships():
    assert manifest_problems(generated()) == []


def test_every_folder_holds_a_good_entry():
    assert [f"{found.label}: {found.problem}" for found in SHIPPED if found.entry is None] == []


@pytest.mark.parametrize("found", SHIPPED, ids=lambda found: f"{found.path.parts[-3]}-{found.key}")
def test_sources_render_as_they_ship(found):
    """Where this fails after a change of templates or headers: `kvgen check --accept generated` on the device, and look at it."""
    entry = found.entry
    assert entry is not None
    for launch in entry.launches:
        if launch.backend == "tilelang":
            needs_tilelang()
        code = entry.codes[launch.file]
        source = get_backend(launch.backend).lower(entry.spec, entry.schedule(launch), entry.arch)
        assert source.text == code.text
        assert code.source(entry.arch) is not None, "kvgen's headers have changed since it was tuned"
        assert code.source(entry.arch).id == source.id


BEFORE = {("serving-kv8", "32x8192")}
"""Measured before a winner gave way to a faster default: 1.0014 of it. Remove it with the next build of that entry."""


def test_every_entry_of_attention_has_a_table_or_defaults_for_other_calls():
    tables = {found.entry.spec.name: with_defaults(found.entry).dispatch for found in SHIPPED if isinstance(found.entry.spec, KernelSpec)}
    assert len(tables) >= 16
    assert [name for name, table in tables.items() if table is None] == []


def test_no_call_takes_a_launch_that_was_slower_than_the_default():
    tables = [(found.entry.spec.name, found.entry.dispatch) for found in SHIPPED if found.entry is not None and found.entry.dispatch]
    assert len(tables) >= 5
    slower = {
        (name, cell.workload)
        for name, table in tables
        for cell in table.cells
        if (default := table.time(cell, table.default)) is not None and table.time(cell, cell.launch) > default
    }
    assert slower <= BEFORE


def test_a_call_of_a_cell_takes_the_launch_that_serves_it():
    for entry in (found.entry for found in SHIPPED if found.entry is not None and found.entry.dispatch):
        look_up, cells = entry.look_up(), {cell.workload: cell for cell in entry.dispatch.cells}
        for cell in cells.values():
            work = cell.work
            if work.load == "rested":
                tokens = round(work.batch * mean_length(work))
                assert look_up.launch(work.batch, work.kv_len, work.q_len, tokens) == cell.launch, (entry.spec.name, cell.workload)
