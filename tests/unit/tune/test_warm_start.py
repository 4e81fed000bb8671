"""A search for a new format begins with what won for others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvgen.registry import Store
from kvgen.registry.entry import Entry
from kvgen.spec import KernelSpec
from kvgen.toolchain import ArtifactCache
from kvgen.tune.budget import Budget
from kvgen.tune.contenders import contenders
from kvgen.tune.tuner import tune
from kvgen.tune.warm_start import warm_starts
from tests.support.tuning import FakeBackend, FakeRunner, fake_cost, tiny_spec

INT8 = {"key": {"bits": 8, "axis": "channel", "group": 32}, "value": {"bits": 8, "axis": "token", "group": 32}}
Seen = list[tuple[str, object, object]]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "registry")


def build(store: Store, spec: KernelSpec, *, fresh: bool = False, best: int | None = None, trials: int | None = None) -> tuple[Entry, Seen]:
    """The winner, which has `best` threads if that is given, and what was measured in the search, in order."""
    runner = FakeRunner(
        cost=fake_cost if best is None else lambda candidate: 100.0 + 20 * abs(candidate.schedule.launch.integer("threads") - best)
    )
    cache = ArtifactCache(store.root.parent / f"cache-{spec.format_id}-{fresh}")
    result = tune(spec, "cpu", Budget(trials=trials), backends=[FakeBackend()], cache=cache, store=store, runner=runner, fresh=fresh)
    return result.entry, [(p.workload.key, p.schedule.layout["block"], p.schedule.launch["threads"]) for p in runner.measured]


def asked(store: Store, spec: KernelSpec) -> Seen:
    found, _ = contenders(spec, "cpu", [FakeBackend()])
    return [(p.workload.key, p.schedule.layout["block"], p.schedule.launch["threads"]) for p in warm_starts(spec, "cpu", found, [store])]


def test_what_won_for_another_format_follows_the_defaults_unless_a_build_is_fresh(store: Store) -> None:
    entry, _ = build(store, tiny_spec(), best=8)
    assert 8 in {launch.params["threads"] for launch in entry.launches}
    for fresh in (False, True):
        spec = tiny_spec(**INT8)
        _, seen = build(store, spec, fresh=fresh, trials=8)
        assert seen[:2] == [("1x128", 64, 2), ("2x512", 64, 2)]
        assert (("2x512", 64, 8) in seen[2:4]) != fresh
        for one in store.find(spec):
            store.remove(one)


def test_the_launches_of_similar_workloads_come_first_each_once_and_only_where_they_are_allowed(store: Store) -> None:
    long, short = tiny_spec(workloads=[{"batch": 2, "kv_len": 1024}], **INT8), tiny_spec(workloads=[{"batch": 2, "kv_len": 512}])
    build(store, long, best=8)
    build(store, short, fresh=True, best=4)
    assert asked(store, short) == [("2x512", 64, 4), ("2x512", 64, 8)]
    assert asked(store, long) == [("2x1024", 64, 8), ("2x1024", 64, 4)]
    assert asked(store, tiny_spec(workloads=[{"batch": 1, "kv_len": 256}])) == [("1x256", 64, 4)]


def test_untuned_entries_and_those_for_other_targets_do_not_count(store: Store, tmp_path: Path) -> None:
    entry, _ = build(store, tiny_spec(), best=4)
    for changed in (replace(entry, arch="sm90"), replace(entry, provenance={**entry.provenance, "tuned": False})):
        other = Store(tmp_path / changed.arch / str(changed.provenance["tuned"]))
        other.put(changed)
        assert other.all()[0].entry is not None
        assert asked(other, tiny_spec(**INT8)) == []
