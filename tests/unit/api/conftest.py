"""A registry with one entry whose module is small and compiles in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvgen.api import forget
from kvgen.lower import backend as backends
from kvgen.lower.backend import Source
from kvgen.lower.schedule import Params, Schedule
from kvgen.registry.entry import Entry, here
from kvgen.registry.store import Store
from kvgen.spec import KernelSpec, load_spec
from kvgen.spec.workloads import Timing
from kvgen.toolchain import ArtifactCache, build
from tests.support.naive import naive_schedule, naive_source, naive_spec


class WithNaive:
    """A back end that renders the naive module for schedules with a parameter `naive`, another one for each value."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def lower(self, spec: KernelSpec, schedule: Schedule, target: str) -> Source:
        return naive_variant(schedule) if "naive" in schedule.launch else self._backend.lower(spec, schedule, target)


def naive_variant(schedule: Schedule) -> Source:
    source, number = naive_source(), schedule.launch["naive"]
    return type(source)(f"{source.text}\nint variant_{number};\n" if number else source.text, "c++", "cpu", flags=source.flags)


@pytest.fixture(scope="session")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of compiled modules that the tests of this folder share."""
    return tmp_path_factory.mktemp("modules")


@pytest.fixture
def places(tmp_path: Path, modules: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Registries of this test's own; the folder of the user's."""
    monkeypatch.setenv("KVGEN_REGISTRY_DIR", str(tmp_path / "user"))
    monkeypatch.setenv("KVGEN_SITE_DIR", str(tmp_path / "site"))
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(modules))
    real = backends.get_backend
    monkeypatch.setattr(backends, "get_backend", lambda name: WithNaive(real(name)))
    forget()
    yield tmp_path / "user"
    forget()


@pytest.fixture
def spec() -> KernelSpec:
    return naive_spec()


def wanting(spec: KernelSpec, *shapes: tuple[int, int]) -> KernelSpec:
    """The spec with other workloads."""
    works = [{"batch": batch, "kv_len": kv_len} for batch, kv_len in shapes]
    return load_spec({**spec.to_json(), "workloads": works})


def naive_entry(spec: KernelSpec, *, variants: int = 1) -> Entry:
    """An entry of the spec's workloads; with two variants, every second workload gets its own module."""
    launches = []
    for index, work in enumerate(spec.workloads):
        schedule = Schedule("cpu", naive_schedule().layout, Params(naive=index % variants and index))
        source = naive_variant(schedule)
        launches.append((work, schedule, source, build(source, ArtifactCache())))
    times = tuple(Timing(work, 10.0) for work in spec.workloads)
    return Entry.of(spec, "cpu", launches, device=here("cpu"), timings=times, provenance={"date": "2026-01-01"})


@pytest.fixture
def registered(places: Path, spec: KernelSpec) -> Entry:
    """The spec's entry, registered for the user."""
    entry = naive_entry(spec)
    Store(places).put(entry)
    return entry
