"""Variants of the GPU back ends in short words (see benchmarks/gpu_words.py), compiled many at once."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache

from benchmarks.gpu_words import schedules_of, spec_of, workload_of
from kvgen.arch import Target
from kvgen.lower.backends import get_backend
from kvgen.lower.base import Source
from kvgen.lower.schedule import Schedule, layout_of
from kvgen.reference.layout import PackedLayout
from kvgen.runtime.module import load
from kvgen.runtime.variant import Variant
from kvgen.spec import KernelSpec
from kvgen.toolchain import Artifact, build


@dataclass(frozen=True)
class Point:
    """A spec, a schedule and a target by their words."""

    words: str
    schedule_words: str = "default"
    target: Target = "sm90"
    backend: str = "cuda"

    def __str__(self) -> str:
        return f"{self.words}-{self.schedule_words}-{self.target}"

    @property
    def spec(self) -> KernelSpec:
        """The spec, for one small workload."""
        return spec_of(self.words, self.target, [workload_of("4x2048")])

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

    @property
    def foreign(self) -> bool:
        """Whether a GPU of today runs it through its PTX."""
        return self.target != "sm90"


class Compilation:
    """Compiles points in the background, in order, each once. Whoever asks for one earlier than it is ready waits for it.

    Failures are met again by whoever asks for the point.
    """

    def __init__(self, points: Iterable[Point]) -> None:
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="compile")
        self._jobs = [self._pool.submit(artifact, point) for point in dict.fromkeys(points)]

    def wait(self) -> None:
        """Until all is compiled, or failed."""
        wait(self._jobs)

    def close(self) -> None:
        """Drop what has not begun, wait for the rest."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def artifact(point: Point) -> Artifact:
    """The compiled point. Raises CompileError."""
    return build(point.source(), ptx_only=point.foreign)


@cache
def variant(point: Point) -> Variant:
    """The loaded point."""
    return Variant(point.spec, point.layout, load(artifact(point).path))
