"""The winners that ship: whole, and rendered again, token for token, from what they say."""

from __future__ import annotations

import pytest

from kvgen.registry import packaged_store
from kvgen.registry.store import format_name
from kvgen.spec import KernelSpec
from tests.support.kernel_cases import needs_tilelang

SHIPPED = packaged_store().all()


def test_every_file_holds_a_good_entry_under_its_formats_name():
    assert [f"{found.label}: {found.problem}" for found in SHIPPED if found.entry is None] == []
    assert [one.path for one in SHIPPED if one.path.name.partition(".")[0] != format_name(one.entry.spec)] == []
    assert len(SHIPPED) >= 20


@pytest.mark.parametrize("found", SHIPPED, ids=lambda found: f"{found.path.parent.name}-{found.key}")
def test_launches_render_to_what_was_measured(found):
    """Where this fails after a change of templates or headers: `kvgen check --accept generated` on the device, and look at it."""
    if any(launch.backend == "tilelang" for launch in found.entry.launches):
        needs_tilelang()
    assert not found.entry.outdated


def test_every_entry_of_attention_has_launches_for_other_calls():
    """One launch for its workloads, and others for more or fewer heads: two of them at least, and no more than four in all where workloads
    do not have as many winners.
    """
    for entry in (found.entry for found in SHIPPED if isinstance(found.entry.spec, KernelSpec)):
        assert 2 <= len(entry.launches) <= max(4, sum(bool(launch.workloads) for launch in entry.launches)), entry.spec.name
        look_up = entry.look_up()
        served = {look_up.launch(batch, length, 1, batch * length) for batch in (1, 4, 8, 64, 512) for length in (2048, 32768)}
        assert len(served) >= 2, entry.spec.name
