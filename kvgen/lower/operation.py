"""What the lowerings of linear layers and of operations on a matrix share. There is nothing to choose about the bytes that their kernels
read, so the layout part of a schedule is empty.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvgen.arch import Target
from kvgen.lower.backend import CPU_FLAGS, Lowering, S, Source
from kvgen.lower.gpu import wrong_target
from kvgen.lower.schedule import Params, Schedule
from kvgen.lower.space import Fact, SearchSpace

NO_LAYOUT = Params()
CPU_ELEMENTS = {"float16": "kvgen::Half", "bfloat16": "kvgen::Bfloat", "float32": "float"}


@dataclass(frozen=True)
class OperationLowering(Lowering[S]):
    """The kernels of one back end, `cuda` or `cpu`: one template, which lies with its headers in the folder of its name."""

    operation: ClassVar[str]
    """In the names of template and search space."""
    functions: ClassVar[tuple[str, ...]]
    """Of a module."""

    name: str
    targets: tuple[Target, ...]
    elements: Mapping[str, str]
    """Types of elements by the dtypes that the back end computes, as the template writes them."""

    @abstractmethod
    def facts(self, spec: Any, target: Target) -> Mapping[str, Fact]:
        """What the rules of the search space know, besides the target."""

    @abstractmethod
    def context(self, spec: Any, target: Target) -> Mapping[str, Any]:
        """What the template knows, besides the launch and the dtype."""

    def unsupported(self, spec: S, target: Target) -> str | None:
        del spec
        return wrong_target(self.targets, target)

    def space(self, spec: Any, target: Target) -> SearchSpace:
        """`search_spaces/<name>-<operation>.yaml`. Raises UnsupportedError."""
        self.require(spec, target)
        return SearchSpace.load(f"{self.name}-{self.operation}", {"target": target, **self.facts(spec, target)}, spec.workloads)

    def lower(self, spec: Any, schedule: Schedule, target: Target) -> Source:
        """Source of one variant. Raises UnsupportedError where spec or schedule cannot be built."""
        self.require_schedule(spec, schedule, target)
        dtype = getattr(spec, self.operation).dtype
        template, flags = ("cpu/{}.cpp.jinja", CPU_FLAGS) if self.name == "cpu" else ("cuda/{}.cu.jinja", ())
        return Source.of_template(
            template.format(self.operation),
            target,
            self.functions,
            flags,
            launch=dict(schedule.launch),
            element=self.elements[dtype],
            type="k" + dtype.capitalize(),
            **self.context(spec, target),
        )
