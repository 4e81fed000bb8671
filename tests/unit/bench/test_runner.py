"""What the benchmark scripts share: turns, files of results, compiling many."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compiling, gpu_backends, output
from benchmarks.turns import take_turns
from kvgen.csvfile import CsvFile
from kvgen.errors import CompileError
from kvgen.lower.base import Source
from kvgen.toolchain import Artifact, KernelResources, Resources


def test_kernels_take_turns_and_reads_follow_every_third_round() -> None:
    order: list[str] = []

    def turn(name: str) -> list[float]:
        order.append(name)
        return [float(len(order))]

    samples, reads = take_turns({name: partial(turn, name) for name in "ab"}, 4, {64: partial(turn, "read")})
    assert "".join(order) == "abreadbaabbaread"
    assert samples == {"a": [1.0, 5.0, 6.0, 9.0], "b": [2.0, 4.0, 7.0, 8.0]}
    assert reads == {64: [3.0, 10.0]}


def test_rows_carry_the_facts_of_their_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    output.write_rows("some", [{"us": 1.5}, {"us": 2}], {"device": "a GPU", "date": "2026-01-01"})
    with (tmp_path / "out" / "some.csv").open() as file:
        assert list(csv.DictReader(file)) == [{"us": us, "device": "a GPU", "date": "2026-01-01"} for us in ("1.5", "2")]
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["some.csv"]
    output.write_json("other", [{"us": 1.5}])
    assert json.loads((tmp_path / "out" / "other.json").read_text()) == [{"us": 1.5}]
    monkeypatch.delenv("OUT")
    assert output.folder() == Path(output.__file__).parent / "results"


def test_a_back_end_comparison_keeps_the_rows_before_a_module_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"workload": 0, "us": 2.0, "read_us": 1.0, "decode_us": 3.0, "relative_l2": 1e-4}
    module = {"backend": "cuda", "target": "sm90", "word": "w8", "registers": 96, "spill": 0, "schedule": "cuda sm90 w8"}

    def child(task: object, take: Callable[[dict[str, Any]], None]) -> tuple[tuple[str, int], str]:
        take({**line, "schedule": module["schedule"]})
        return ("cuda sm90 w4", 0), "exit status -9"

    monkeypatch.setattr(gpu_backends, "child", child)
    task = {"spec": {"name": "k4v4", "workloads": [{"batch": 8, "kv_len": 32768}]}, "modules": [module]}
    with pytest.raises(RuntimeError, match="k4v4.*w4.*status -9"):
        gpu_backends.measured(task, {"device": "a GPU"}, CsvFile(tmp_path / "rows.csv"))
    with (tmp_path / "rows.csv").open() as file:
        assert [(row["schedule"], row["us"], row["device"]) for row in csv.DictReader(file)] == [("w8", "2.0", "a GPU")]


def test_each_distinct_source_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = Source("int x;", "cuda", "sm90"), Source("nonsense", "cuda", "sm90")
    used = {
        "attend<1>": KernelResources(registers=96),
        "attend<2>": KernelResources(registers=128, spill_bytes=8),
        "pack": KernelResources(255),
    }
    artifact, failure = Artifact("id", Path("module.so"), Resources("nvcc", 1.0, used)), CompileError("no")
    asked: list[Source] = []

    def build_many(sources: list[Source], *_: object, **__: object) -> list[tuple[int, object]]:
        asked.extend(sources)
        return [(1, failure), (0, artifact)]

    monkeypatch.setattr(compiling, "build_many", build_many)
    assert compiling.build_sources([good, bad, good], 2) == [artifact, failure, artifact]
    assert asked == [good, bad]
    assert compiling.attend_usage(artifact) == (128, 8)
