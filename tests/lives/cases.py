"""Compiled variants for lives on a GPU, drawn at random."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from kvgen.arch import Target
from kvgen.format.layout import PackedLayout
from kvgen.lower.backend import get_backend
from kvgen.lower.schedule import Schedule, layout_of
from kvgen.runtime.calls import Variant
from kvgen.runtime.module import load
from kvgen.spec import KernelSpec
from kvgen.toolchain import Artifact, build
from tests.lives.draw import CUDA, TILELANG, drawn_gpu_spec, drawn_schedule, drawn_tilelang_spec


@dataclass(frozen=True)
class LifeCase:
    """A spec, one of its schedules, and the target that it is compiled for."""

    spec: KernelSpec
    schedule: Schedule
    target: Target

    def __str__(self) -> str:
        return f"{self.spec.format()}\n{self.schedule}\nfor {self.target}"

    @property
    def layout(self) -> PackedLayout:
        """Its packed layout."""
        return layout_of(self.spec, self.schedule.layout)

    @property
    def foreign(self) -> bool:
        """Whether an SM90 GPU runs it through its PTX."""
        return self.target in ("sm80", "sm89")

    def artifact(self) -> Artifact:
        """The module, from the cache or compiled now. Raises UnsupportedError, CompileError."""
        source = get_backend(self.schedule.backend).lower(self.spec, self.schedule, self.target)
        return build(source)

    def compiled(self) -> Variant:
        """The module, loaded. Raises as `artifact` does."""
        return Variant(self.spec, self.layout, load(self.artifact().path))


def drawn_cases(seed: int, count: int) -> list[LifeCase]:
    """Cases for a GPU, the same on every machine: mostly CUDA's for SM90; some of TileLang's, some for older targets."""
    draw, cases = Random(seed), []
    for _ in range(count):
        backend = draw.choices([TILELANG, CUDA], [1, 9])[0]
        target: Target = draw.choices(["sm80", "sm89", "sm90"], [1, 1, 16])[0] if backend is CUDA else "sm90"  # type: ignore[assignment]
        spec = drawn_gpu_spec(draw, target) if backend is CUDA else drawn_tilelang_spec(draw)
        cases.append(LifeCase(spec, drawn_schedule(draw, backend, spec, target), target))
    return cases
