"""`kvgen list`, `show` and `why`: what they tell of entries, of entries won by two back ends, and where there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_words import spec_of, workload_of
from kvgen.cli import build
from kvgen.lower.backend import get_backend
from kvgen.registry import Store
from kvgen.spec import dump_spec, load_spec
from kvgen.toolchain import ArtifactCache
from kvgen.tune.tuner import TuningResult, tune
from tests.support.entries import tuned
from tests.support.tuning import FakeBackend, FakeRunner, fake_cost, tiny_spec

WON = {"1x128": "cpu", "2x512": "tilelang"}


def tuned_by(backends: list[FakeBackend], cost: Callable[[Any], float], root: Path) -> TuningResult:
    (root / "tiny.yaml").write_text(dump_spec(tiny_spec()))
    place = {"store": Store(root / "registry"), "cache": ArtifactCache(root / "cache")}
    return tune(tiny_spec(), "cpu", backends=backends, runner=FakeRunner(cost=cost), **place)  # type: ignore[arg-type]


@pytest.fixture
def fake_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvgen.lower.backend.get_backend", FakeBackend)


@pytest.fixture
def built(kvgen: Any, tmp_path: Path, fake_backend: None) -> TuningResult:
    return tuned_by([FakeBackend()], fake_cost, tmp_path)


@pytest.fixture
def mixed(kvgen: Any, tmp_path: Path, fake_backend: None) -> TuningResult:
    """Each back end takes half as long again where the other one is at home."""

    def cost(candidate: Any) -> float:
        return fake_cost(candidate) * (1.0 if candidate.backend == WON[candidate.workload.key] else 1.5)

    return tuned_by([FakeBackend(), FakeBackend("tilelang")], cost, tmp_path)


def test_why_names_the_launch_its_times_and_why_it_serves(kvgen: Any, built: TuningResult):
    timing = built.entry.timing(built.entry.spec.workloads[1])
    assert timing is not None
    text = kvgen("why", "tiny.yaml").out
    assert "2x512 takes launch 1" in text
    assert f"tuned for 2x512, {timing.us:.3g} µs, {timing.read_us / timing.us:.0%} of the read's speed, the default" in text


def test_list_and_show_say_when_times_are_of_other_sources(kvgen: Any, built: TuningResult):
    """A build times what it registers; an entry whose source was rendered anew has the times of the old one."""
    for entry, others in ((built.entry, False), (replace(built.entry, provenance={}), True)):
        Store(built.path.parents[1]).put(entry)
        (listed,) = [one for one in kvgen("list", "--json").json() if one["key"] == entry.key]
        assert listed["timed_with_others"] is kvgen("show", entry.key, "--json").json()["timed_with_others"] is others
        assert ("times of other sources" in kvgen("show", entry.key).out) is others
        line = kvgen("list").out.partition(entry.key)[2]
        assert ("(of other sources)" in " ".join(line.split()[:40])) is others


def test_tables_name_each_workloads_back_end(kvgen: Any, mixed: TuningResult, capsys: pytest.CaptureFixture[str]):
    build.show(mixed)
    told = capsys.readouterr().out
    for text in (told, kvgen("show", mixed.entry.key).out, kvgen("why", "tiny.yaml").out):
        for key, winner in WON.items():
            words = next(line.split() for line in text.splitlines() if line.startswith(key))
            assert words[1] == winner
    assert f"\ndecision: {mixed.why}\n" in kvgen("show", mixed.entry.key).out
    assert "1x128 142 µs cpu, 2x512 232 µs tilelang" in kvgen("list").out
    (answer,) = kvgen("why", "tiny.yaml", "--json").json()
    (listed,) = [one for one in kvgen("list", "--json").json() if one["registry"] == "user"]
    for data in (answer, listed):
        assert {one["workload"]: one["backend"] for one in data["launches"]} == WON
        assert data["backend"] == "cpu+tilelang"


def test_entries_print_no_control_characters(kvgen: Any, tmp_path: Path):
    hostile = "\x1b[2Jgone\rnow\nnext\x07\u202e"
    entry = tuned(spec_of("k4v4", "sm90", [workload_of("1x4096")]))
    facts = {"device": {"name": hostile}, "provenance": {"why": hostile, "tool": hostile}, "toolchain": {"compiler": hostile}}
    entry = replace(entry, **facts)
    Store(tmp_path / "registry").put(entry)
    (tmp_path / "k4v4.yaml").write_text(dump_spec(entry.spec))
    for command in (("show", entry.key), ("list",), ("why", "k4v4.yaml")):
        answer = kvgen(*command)
        assert answer.code == 0
        assert all(line.isprintable() for line in answer.out.split("\n"))
        assert ("\\x1b[2J" in answer.out) == (command[0] != "why")  # which names no device of its own


# --- without an entry ------------------------------------------------------------------------------------------------

HEADS = {"q_heads": 32, "kv_heads": 8, "head_dim": 128}
LARGE_BLOCKS = {"arch": "cpu", "attention": HEADS, "key": {"bits": 4, "group": 4096}, "value": {"bits": 4}}
WIDE = {"arch": "sm90", "attention": {**HEADS, "head_dim": 576}, "key": {"bits": 4}, "value": {"bits": 4, "group": 64}}


@pytest.mark.parametrize(
    ("spec", "reasons"),
    [
        (LARGE_BLOCKS, ["cpu: whole groups need blocks of 4096 tokens"]),
        (WIDE, ["head_dim (576) is more than 512", "tilelang"]),
    ],
)
def test_a_spec_that_no_back_end_supports_has_every_reason_and_no_default(
    kvgen: Any, tmp_path: Path, spec: dict[str, Any], reasons: list[str]
):
    (tmp_path / "asked.yaml").write_text(dump_spec(load_spec({"name": "asked", "workloads": [{"batch": 1, "kv_len": 128}], **spec})))
    answer, data = kvgen("why", "asked.yaml"), kvgen("why", "asked.yaml", "--json")
    assert (answer.code, data.code) == (3, 3)
    assert all(reason in answer.out for reason in [f"asked on {spec['arch']}: none: ", *reasons])
    assert "does not target" not in answer.out
    (told,) = data.json()
    assert (told["how"], told["key"], told["backend"], told["serving"]) == ("none", None, None, [])


@pytest.mark.parametrize("arch", ["cpu", "sm90"])
def test_without_an_entry_the_launches_of_the_default_are_told(kvgen: Any, tmp_path: Path, arch: Any):
    works = [{"batch": 1, "kv_len": 8192}, {"batch": 32, "kv_len": 8192}]
    parts = {"attention": HEADS, "key": {"bits": 4}, "value": {"bits": 4}, "cache": {"local": 64}, "workloads": works}
    spec = load_spec({"name": "asked", "arch": arch, **parts})
    (tmp_path / "asked.yaml").write_text(dump_spec(spec))
    backend, answer = get_backend("cpu" if arch == "cpu" else "cuda"), kvgen("why", "asked.yaml")
    assert answer.code == 3
    for work in spec.workloads:
        assert f"{work.key} takes {backend.name} {backend.default(spec, arch, work).launch}: " in answer.out
    (told,) = kvgen("why", "asked.yaml", "--workload", "1x8192", "--json").json()
    assert (told["how"], told["key"], told["backend"], told["launches"]) == ("default", None, backend.name, [])
    assert told["serving"][0]["params"] == dict(backend.default(spec, arch, spec.workloads[0]).launch)
    assert kvgen("show", "0123").code == 3
