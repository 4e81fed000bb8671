"""Lowering of the operations on a matrix: what the back ends share. Their kernels are over a row-major matrix, and there is nothing to
choose about its codes, so the layout part of a schedule is empty.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from kvgen._resources import templates
from kvgen.arch import Target
from kvgen.errors import UnsupportedError
from kvgen.lower.backend import MATRIX_FUNCTIONS, Language, Source
from kvgen.lower.refusals import wrong_target
from kvgen.lower.schedule import Params, Schedule
from kvgen.lower.space import Fact, SearchSpace
from kvgen.spec import AnyWorkload, MatrixSpec

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
NO_LAYOUT = Params()

PAPER_VARIANTS: Mapping[str, Params] = {
    "naive": Params(channel_threads=32, row_threads=8, vector=1, rows=1, scales="global", cache="default", quotient="divide"),
    "tiled": Params(channel_threads=32, row_threads=8, vector=1, rows=1, scales="shared", cache="default", quotient="divide"),
    "coarsened": Params(channel_threads=256, row_threads=1, vector=1, rows=16, scales="global", cache="default", quotient="divide"),
    "vectorized": Params(channel_threads=32, row_threads=8, vector=4, rows=1, scales="global", cache="default", quotient="divide"),
}
"""The four variants of the INT8 per-channel paper as launches of the CUDA back end. The paper does not give its block sizes."""


class MatrixLowering(ABC):
    """See `kvgen.lower.backend.Lowering`; a back end adds its template, its types and its default."""

    name: str
    targets: tuple[Target, ...]
    template: ClassVar[str]
    language: ClassVar[Language]
    folder: ClassVar[str]
    """Of its headers, below `templates/`."""
    flags: ClassVar[tuple[str, ...]] = ()
    elements: ClassVar[Mapping[str, str]]
    """C++ types of elements by dtype."""

    def missing(self) -> str | None:
        """None: what it needs comes with kvgen."""
        return None

    def unsupported(self, spec: MatrixSpec, target: Target) -> str | None:
        """Why the spec cannot be lowered for the target; None if it can."""
        del spec
        return wrong_target(self.targets, target)

    def space(self, spec: MatrixSpec, target: Target) -> SearchSpace:
        """`search_spaces/<name>-matrix.yaml`. Raises UnsupportedError."""
        self._require(spec, target)
        facts: dict[str, Fact] = {
            "operation": spec.operation,
            "dtype": spec.matrix.dtype,
            "element_bytes": ELEMENT_BYTES[spec.matrix.dtype],
            "target": target,
        }
        return SearchSpace.load(f"{self.name}-matrix", facts, spec.workloads)

    def default(self, spec: MatrixSpec, target: Target, work: AnyWorkload | None = None) -> Schedule:
        """A safe schedule of the space, for all workloads. Raises UnsupportedError."""
        del work
        self._require(spec, target)
        return Schedule(self.name, NO_LAYOUT, self.plain_launch(spec))

    def defaults(self, spec: MatrixSpec, target: Target) -> tuple[Schedule, ...]:
        """The default."""
        return (self.default(spec, target),)

    def tiling(self, spec: MatrixSpec, schedule: Schedule, target: Target) -> None:
        """None: all its tiles are alike, and each is one CTA's."""
        del spec, schedule, target

    def lower(self, spec: MatrixSpec, schedule: Schedule, target: Target) -> Source:
        """Source of one variant. Raises UnsupportedError where spec or schedule cannot be built."""
        from kvgen.lower.template import reached_headers, render

        self._require(spec, target)
        if problems := self.space(spec, target).check(schedule):
            raise UnsupportedError(self.name, f"schedule {schedule}: {'; '.join(problems)}")
        dtype = spec.matrix.dtype
        names: dict[str, Any] = {"dtype": dtype, "element": self.elements[dtype], "type": "k" + dtype.capitalize()}
        text = render(self.template, launch=dict(schedule.launch), **names)
        include: tuple[Path, ...] = tuple(templates() / part / "include" for part in (self.folder, "common"))
        return Source(text, self.language, target, include, self.flags, reached_headers(text, include), MATRIX_FUNCTIONS)

    @abstractmethod
    def plain_launch(self, spec: MatrixSpec) -> Params:
        """The launch of the default."""

    def _require(self, spec: MatrixSpec, target: Target) -> None:
        if reason := self.unsupported(spec, target):
            raise UnsupportedError(self.name, reason)
