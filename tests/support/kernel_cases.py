"""Variants of the GPU back ends, named by the words of benchmarks/gpu_words.py, and compiled in parallel."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache

import pytest

from benchmarks.gpu_words import schedules_of, spec_of, workload_of
from kvgen.arch import Target
from kvgen.format.layout import PackedLayout
from kvgen.lower.backend import Source, get_backend
from kvgen.lower.schedule import Schedule, layout_of
from kvgen.runtime.calls import Variant
from kvgen.runtime.module import load
from kvgen.spec import KernelSpec
from kvgen.toolchain import Artifact, build
from kvgen.verify.check import check


@dataclass(frozen=True)
class KernelCase:
    """A spec, a schedule and a target by their words."""

    words: str
    schedule_words: str = "default"
    target: Target = "sm90"
    backend: str = "cuda"

    def __str__(self) -> str:
        return f"{self.words}-{self.schedule_words}-{self.target}"

    @property
    def spec(self) -> KernelSpec:
        """The spec, for one small workload, which is too long for the short KV tiles of a default."""
        return spec_of(self.words, self.target, [workload_of("4x4608")])

    @property
    def schedule(self) -> Schedule:
        """The schedule."""
        return schedules_of(self.schedule_words, get_backend(self.backend), self.spec, self.target)[0]

    @property
    def layout(self) -> PackedLayout:
        """Its packed layout."""
        return layout_of(self.spec, self.schedule.layout)

    def source(self) -> Source:
        """The rendered source. Raises UnsupportedError."""
        return get_backend(self.backend).lower(self.spec, self.schedule, self.target)


class Compilation:
    """Compiles cases in the background, in order, each once. A test that needs a case waits for it.

    A failure is raised again in every test that needs the case.
    """

    def __init__(self, cases: Iterable[KernelCase]) -> None:
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="compile")
        self._jobs = [self._pool.submit(artifact, case) for case in dict.fromkeys(cases)]

    def wait(self) -> None:
        """Wait until all cases are compiled, or failed."""
        wait(self._jobs)

    def close(self) -> None:
        """Drop cases that have not begun, and wait for the others."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def artifact(case: KernelCase) -> Artifact:
    """The compiled case. Raises CompileError."""
    return build(case.source())


@cache
def variant(case: KernelCase) -> Variant:
    """The loaded case."""
    if case.backend == "tilelang":
        needs_tilelang()
    return Variant(case.spec, case.layout, load(artifact(case).path))


def verify(case: KernelCase) -> None:
    """All that a build verifies of a kernel, on the GPU. Raises CheckError."""
    check(variant(case), "cuda", exact=case.schedule.exact)


def needs_tilelang() -> None:
    """Skip the test, or the whole module that calls it, with the reason why TileLang does not lower here."""
    reason = get_backend("tilelang").missing()
    if reason is not None:
        pytest.skip(reason, allow_module_level=True)
