"""The winners that ship: whole, listed, and rendered again, token for token, from what they say."""

from __future__ import annotations

import pytest

from kvgen._resources import generated
from kvgen.lower.backend import get_backend
from kvgen.lower.tokens import tokens_digest
from kvgen.registry import packaged_store
from kvgen.registry.manifest import manifest_problems
from kvgen.spec import KernelSpec
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
        assert tokens_digest(source.text) == tokens_digest(code.text)
        assert code.source(entry.arch) is not None, "kvgen's headers have changed since it was tuned"


def test_every_entry_of_attention_has_launches_for_other_calls():
    """One launch for its workloads, and others for more or fewer heads: two of them at least, at most four in all."""
    entries = [found.entry for found in SHIPPED if found.entry is not None and isinstance(found.entry.spec, KernelSpec)]
    assert len(entries) >= 17
    for entry in entries:
        schedules = {entry.schedule(launch) for launch in entry.every_launch}
        assert 2 <= len(schedules) <= 4, entry.spec.name
        look_up = entry.look_up()
        served = {look_up.launch(batch, length, 1, batch * length) for batch in (1, 4, 8, 64, 512) for length in (2048, 32768)}
        assert len(served) >= 2, entry.spec.name
