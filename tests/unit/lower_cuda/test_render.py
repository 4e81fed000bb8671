"""Rendered sources: golden, free of names, with the headers that decide them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu_words import schedules_of, spec_of, workload_of
from kvgen.arch import Target
from kvgen.errors import UnsupportedError
from kvgen.lower.backend import Source, get_backend
from kvgen.lower.schedule import Params, Schedule

GOLDEN = Path(__file__).parent / "golden"
CASES: tuple[tuple[str, str, Target], ...] = (
    ("k4v4", "w8u4d1", "sm90"),
    ("k2v8:bf16:q4:page128:h40/8", "w8u2d1.two", "sm80"),
    ("k8v8:token:sym:d96:h7/1", "w8u2d1.cl8", "sm90"),
    ("k4v8:token:window4096:cap30", "w8u2d1", "sm90"),
    ("k2v2:sink32:local128:rollback4:page128:sinks", "w8u2d1", "sm90"),
)
WORK = [workload_of("8x32768")]


def source(words: str, schedule: str, target: Target) -> Source:
    backend = get_backend("cuda")
    spec = spec_of(words, target, WORK)
    return backend.lower(spec, schedules_of(schedule, backend, spec, target)[0], target)


@pytest.mark.parametrize(("words", "schedule", "target"), CASES)
def test_golden_sources(words: str, schedule: str, target: Target) -> None:
    """KVGEN_ACCEPT=1 rewrites them."""
    file = GOLDEN / f"{words.replace(':', '-').replace('/', '-')}.cu"
    text = source(words, schedule, target).text
    if os.environ.get("KVGEN_ACCEPT"):
        file.write_text(text)
    assert text == file.read_text()


def test_name_arch_and_workloads_leave_no_trace() -> None:
    backend = get_backend("cuda")
    spec = spec_of("k4v4", "sm90", WORK)
    other = replace(spec, name="another", arch="native", workloads=(workload_of("1x100"),))
    schedule = backend.default(spec, "sm80")
    assert backend.lower(spec, schedule, "sm90").id == backend.lower(other, schedule, "sm90").id
    assert backend.lower(spec, schedule, "sm90").id != backend.lower(spec, schedule, "sm80").id


def test_headers_are_followed_through_includes() -> None:
    plain = {"module.cuh", "attend.cuh", "pack.cuh", "packed_format.cuh", "plan.hpp", "calls.hpp"}
    seams = {"softcap.cuh", "sliding_window.cuh", "learned_sinks.cuh"}
    names = {header.name for header in source("k4v4", "w8u4d1", "sm90").headers}
    assert plain <= names
    assert not seams & names
    assert plain | seams <= {header.name for header in source("k4v4:window4096:cap30:sinks", "w8u4d1", "sm90").headers}


def test_schedules_outside_the_space_are_refused() -> None:
    backend = get_backend("cuda")
    spec = spec_of("k4v4", "sm90", WORK)
    schedule = backend.default(spec, "sm90")
    wide = Schedule("cuda", schedule.layout, Params({**schedule.launch, "warps": 16, "ctas_per_sm": 2}))
    with pytest.raises(UnsupportedError, match="shared memory"):
        backend.lower(spec, wide, "sm90")
    with pytest.raises(UnsupportedError, match="not for cpu"):
        backend.lower(spec, schedule, "cpu")
