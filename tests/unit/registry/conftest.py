"""Entries made of a source that needs no compiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvgen import _resources
from kvgen.lower.backend import Source
from kvgen.lower.schedule import Params, Schedule
from kvgen.registry.entry import Entry
from kvgen.registry.store import Store
from kvgen.spec import KernelSpec, Workload, load_spec
from kvgen.spec.timing import Timing

SPEC = {
    "name": "small",
    "arch": "cpu",
    "attention": {"q_heads": 4, "kv_heads": 2, "head_dim": 64},
    "key": {"bits": 4, "axis": "channel", "group": 32},
    "value": {"bits": 4, "axis": "token", "group": 64},
    "workloads": [{"batch": 1, "kv_len": 4096}],
}

MakeEntry = Callable[..., Entry]


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder of its own, so that a test may change a header."""
    root = tmp_path / "data"
    include = root / "templates" / "cpu" / "include"
    include.mkdir(parents=True)
    (include / "kernel.h").write_text("int one;\n")
    (root / "generated").mkdir()
    monkeypatch.setenv("KVGEN_DATA_DIR", str(root))
    _resources.root.cache_clear()
    yield root
    _resources.root.cache_clear()


@pytest.fixture
def spec() -> KernelSpec:
    return load_spec(SPEC)


@pytest.fixture
def make_entry(data_dir: Path) -> MakeEntry:
    """Build an entry; keyword arguments replace parts of it."""

    def make(
        workloads: tuple[tuple[int, int], ...] = ((1, 4096),),
        device: str = "Test CPU",
        date: str = "2026-01-01",
        launch: int = 1,
        us: float = 10.0,
        backends: tuple[str, ...] = ("cpu",),
        **changes: Any,
    ) -> Entry:
        works = [Workload(batch=batch, kv_len=kv_len) for batch, kv_len in workloads]
        spec = load_spec({**SPEC, "workloads": [work.to_json() for work in works], **changes.pop("spec", {})})
        header = data_dir / "templates" / "cpu" / "include" / "kernel.h"
        layout = Params(block=32, order="simd")
        launches = []
        for index, work in enumerate(works):
            params = Params(tile=launch + index)
            source = Source(f"int tile = {launch + index};\n", "c++", "cpu", (header.parent,), (), (header,))
            launches.append((work, Schedule(backends[index % len(backends)], layout, params), source, None))
        facts = {"device": {"name": device, "threads": 2}, "provenance": {"date": date}, "timings": tuple(Timing(w, us) for w in works)}
        return Entry.of(spec, "cpu", launches, **{**facts, **changes})

    return make


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "registry", "user")
