"""Entries of a back end whose sources need no compiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvgen import _resources
from kvgen.lower import backend as backends
from kvgen.lower.backend import Source
from kvgen.lower.constraints import Rule
from kvgen.lower.schedule import Params, Schedule
from kvgen.lower.space import Parameter, SearchSpace
from kvgen.registry.entry import Entry
from kvgen.registry.store import Store
from kvgen.spec import KernelSpec, Workload, load_spec
from kvgen.spec.workloads import Timing

SPEC = {
    "name": "small",
    "arch": "cpu",
    "attention": {"q_heads": 4, "kv_heads": 2, "head_dim": 64},
    "key": {"bits": 4, "axis": "channel", "group": 32},
    "value": {"bits": 4, "axis": "token", "group": 64},
    "workloads": [{"batch": 1, "kv_len": 4096}],
}

MakeEntry = Callable[..., Entry]


class Tiles:
    """A back end that renders a line and includes one header. The space of `cpu` has tiles 1, 2 and, for long caches, 77; of others 8."""

    targets = ("cpu",)

    def __init__(self, name: str) -> None:
        self.name = name

    def missing(self) -> None:
        return None

    def unsupported(self, spec: KernelSpec, target: str) -> str | None:
        return "it refuses sinks" if spec.attention.sinks else None

    def defaults(self, spec: KernelSpec, target: str) -> tuple[Schedule, ...]:
        return ()

    def tiling(self, *_: object) -> None:
        return None

    def space(self, spec: KernelSpec, target: str) -> SearchSpace:
        tiles = (1, 2, 77) if self.name == "cpu" else (8,)
        fixed = [Parameter("block", "layout", (32,), ""), Parameter("order", "layout", ("simd",), "")]
        hints = [Rule("{tile} tiles are more than {kv_len}", lambda p: p.tile < p.kv_len or p.tile < 77)]
        return SearchSpace(self.name, [*fixed, Parameter("tile", "launch", tiles, "")], hints=hints)

    def lower(self, spec: KernelSpec, schedule: Schedule, target: str) -> Source:
        header = _resources.templates() / "cpu" / "include" / "kernel.h"
        return Source(f"int tile = {schedule.launch['tile']};\n", "c++", "cpu", (header.parent,), (), (header,))


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
def make_entry(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> MakeEntry:
    """Build an entry; keyword arguments replace parts of it."""
    monkeypatch.setattr(backends, "get_backend", Tiles)

    def make(
        workloads: tuple[tuple[int, int], ...] = ((1, 4096),),
        device: str = "Test CPU",
        date: str = "2026-01-01",
        launch: int = 1,
        us: float = 10.0,
        names: tuple[str, ...] = ("cpu",),
        **changes: Any,
    ) -> Entry:
        works = [Workload(batch=batch, kv_len=kv_len) for batch, kv_len in workloads]
        spec = load_spec({**SPEC, "workloads": [work.to_json() for work in works], **changes.pop("spec", {})})
        launches = []
        for index, work in enumerate(works):
            schedule = Schedule(names[index % len(names)], Params(block=32, order="simd"), Params(tile=launch + index))
            launches.append((work, schedule, Tiles(schedule.backend).lower(spec, schedule, "cpu"), None))
        facts = {"device": {"name": device, "threads": 2}, "provenance": {"date": date}, "timings": tuple(Timing(w, us) for w in works)}
        return Entry.of(spec, "cpu", launches, **{**facts, **changes})

    return make


@pytest.fixture
def other_header(data_dir: Path) -> Callable[[str], object]:
    """Change the header that all entries include."""
    return (data_dir / "templates" / "cpu" / "include" / "kernel.h").write_text


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "registry", "user")
