"""A back end of several operations: each question goes to the lowering of the spec's operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from kvgen.arch import Target
from kvgen.errors import UnsupportedError
from kvgen.lower.base import Lowering, Source
from kvgen.lower.schedule import Schedule
from kvgen.spec import AnySpec, AnyWorkload, KernelSpec, MatrixSpec
from kvgen.spec.dispatch import Tiling

if TYPE_CHECKING:  # fetching a kernel searches nothing
    from kvgen.lower.space import SearchSpace


class Operations:
    """See `kvgen.lower.base.Backend`. `matrix` is None for a back end that has no operation on a matrix."""

    def __init__(self, attention: Lowering[KernelSpec], matrix: Lowering[MatrixSpec] | None) -> None:
        self.name, self.targets = attention.name, attention.targets
        self.attention, self.matrix = attention, matrix

    def missing(self) -> str | None:
        """See `Lowering`."""
        return self.attention.missing()

    def unsupported(self, spec: AnySpec, target: Target) -> str | None:
        """See `Lowering`."""
        lowering = self._of(spec)
        return self._refusal(spec) if lowering is None else lowering.unsupported(spec, target)

    def space(self, spec: AnySpec, target: Target) -> SearchSpace:
        """See `Lowering`."""
        return self._require(spec).space(spec, target)

    def default(self, spec: AnySpec, target: Target, work: AnyWorkload | None = None) -> Schedule:
        """See `Lowering`."""
        return self._require(spec).default(spec, target, work)

    def defaults(self, spec: AnySpec, target: Target) -> tuple[Schedule, ...]:
        """See `Lowering`."""
        return self._require(spec).defaults(spec, target)

    def lower(self, spec: AnySpec, schedule: Schedule, target: Target) -> Source:
        """See `Lowering`."""
        return self._require(spec).lower(spec, schedule, target)

    def tiling(self, spec: AnySpec, schedule: Schedule, target: Target) -> Tiling | None:
        """See `Lowering`."""
        return self._require(spec).tiling(spec, schedule, target)

    def _of(self, spec: AnySpec) -> Lowering[AnySpec] | None:
        chosen = self.matrix if isinstance(spec, MatrixSpec) else self.attention
        return cast("Lowering[AnySpec] | None", chosen)

    def _require(self, spec: AnySpec) -> Lowering[AnySpec]:
        lowering = self._of(spec)
        if lowering is None:
            raise UnsupportedError(self.name, self._refusal(spec))
        return lowering

    @staticmethod
    def _refusal(spec: AnySpec) -> str:
        operation = spec.operation if isinstance(spec, MatrixSpec) else "attention"
        return f"it has no kernels for the operation {operation}"
