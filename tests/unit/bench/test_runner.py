"""What the benchmark scripts share: turns, files of results, compiling many."""

from __future__ import annotations

import csv
import json
from functools import partial
from pathlib import Path

import pytest

from benchmarks import compiling, output
from benchmarks.turns import take_turns
from kvgen.errors import CompileError
from kvgen.lower.base import Source
from kvgen.toolchain import Artifact, KernelResources, Resources


def test_kernels_take_turns_and_reads_follow_every_third_round() -> None:
    order: list[str] = []

    def turn(name: str) -> list[float]:
        order.append(name)
        return [float(len(order))]

    samples, reads = take_turns({name: partial(turn, name) for name in "ab"}, 4, {64: partial(turn, "read")})
    assert "".join(order) == "abreadabababread"
    assert samples == {"a": [1.0, 4.0, 6.0, 8.0], "b": [2.0, 5.0, 7.0, 9.0]}
    assert reads == {64: [3.0, 10.0]}


def test_rows_carry_the_facts_of_their_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    output.write_rows("some", [{"us": 1.5}, {"us": 2}], {"device": "a GPU", "date": "2026-01-01"})
    with (tmp_path / "out" / "some.csv").open() as file:
        assert list(csv.DictReader(file)) == [{"us": us, "device": "a GPU", "date": "2026-01-01"} for us in ("1.5", "2")]
    output.write_json("other", [{"us": 1.5}])
    assert json.loads((tmp_path / "out" / "other.json").read_text()) == [{"us": 1.5}]
    monkeypatch.delenv("OUT")
    assert output.folder() == Path(output.__file__).parent / "results"


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
