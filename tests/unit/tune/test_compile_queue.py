from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from kvgen.lower.backend import Source, Sources
from kvgen.lower.schedule import Params, Schedule
from kvgen.toolchain import Artifact, ArtifactCache, Resources
from kvgen.tune.compile_queue import CompileQueue
from tests.support.tuning import FakeBackend, tiny_spec


def schedule(threads: int) -> Schedule:
    return Schedule("cpu", Params(block=64, order="simd"), Params(threads=threads))


@pytest.fixture
def gate() -> Iterator[Event]:
    """Compilers wait for it."""
    event = Event()
    yield event
    event.set()


@pytest.fixture
def compile_queue(tmp_path: Path, gate: Event, monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileQueue]:
    def build(source: Source, cache: ArtifactCache, **options: object) -> Artifact:
        assert gate.wait(60.0)
        return Artifact(source.id, tmp_path, Resources("g++", 1.0, {}))

    monkeypatch.setattr("kvgen.toolchain.compile.build", build)
    with CompileQueue(Sources(tiny_spec(), "cpu", {"cpu": FakeBackend()}), ArtifactCache(tmp_path), workers=2) as made:
        yield made
        gate.set()


def test_the_first_compiled_is_found_and_none_where_time_is_up(compile_queue: CompileQueue, gate: Event):
    some = [schedule(threads) for threads in (1, 2, 4)]
    for one in some:
        compile_queue.start(one)
    assert compile_queue.first_ready(some, 0.0) is None
    gate.set()
    compile_queue.wait_idle()
    assert compile_queue.first_ready(some, 0.0) == 0


def test_what_was_not_begun_is_dropped_and_can_be_asked_for_again(compile_queue: CompileQueue, gate: Event):
    for threads in range(1, 9):
        compile_queue.start(schedule(threads))
    compile_queue.cancel_pending()
    gate.set()
    compile_queue.wait_idle()
    assert compile_queue.artifact(schedule(8)).resources.compiler == "g++"


def test_room_counts_what_the_usual_time_allows_beside_what_is_started(compile_queue: CompileQueue, gate: Event):
    assert compile_queue.capacity(1.0) > 0
    gate.set()
    compile_queue.artifact(schedule(1))
    compile_queue._built[:] = [4.0, 6.0]
    assert [compile_queue.capacity(seconds) for seconds in (4.9, 5.0, 10.0)] == [0, 2, 4]
    gate.clear()
    compile_queue.start(schedule(2))
    assert compile_queue.capacity(10.0) == 3
