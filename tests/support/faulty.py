"""A back end over the naive module: one launch is right, the others fail in one way each."""

from __future__ import annotations

from kvgen.arch import Target
from kvgen.lower.backend import Source
from kvgen.lower.schedule import Params, Schedule
from kvgen.lower.space import Parameter, SearchSpace
from kvgen.spec import AnyWorkload, KernelSpec
from kvgen.spec.dispatch import Tiling
from tests.support.naive import BLOCK, naive_source

FAULTY = ("crash", "hang", "eat", "leak", "wrong")


class FaultyBackend:
    """The default is right. Every other candidate fails in one way: it crashes, hangs, takes all memory, at once or call by call, is wrong
    or does not compile.
    """

    name = "cpu"
    targets: tuple[Target, ...] = ("cpu",)

    def missing(self) -> str | None:
        return None

    def unsupported(self, spec: KernelSpec, target: Target) -> str | None:
        return None

    def space(self, spec: KernelSpec, target: Target) -> SearchSpace:
        return SearchSpace(
            self.name,
            [
                Parameter("block", "layout", (BLOCK,), "tokens"),
                Parameter("order", "layout", ("simd",), "order"),
                Parameter("fault", "launch", ("none", *FAULTY, "broken"), "what it does"),
            ],
            workloads=spec.workloads,
        )

    def default(self, spec: KernelSpec, target: Target, work: AnyWorkload | None = None) -> Schedule:
        return Schedule(self.name, Params(block=BLOCK, order="simd"), Params(fault="none"))

    def defaults(self, spec: KernelSpec, target: Target) -> tuple[Schedule, ...]:
        return (self.default(spec, target),)

    def tiling(self, spec: KernelSpec, schedule: Schedule, target: Target) -> Tiling:
        return Tiling(1, 1, 1, 64, 1024, 1.0)

    def lower(self, spec: KernelSpec, schedule: Schedule, target: Target) -> Source:
        fault = schedule.launch.text("fault")
        if fault == "broken":
            return Source("#error this schedule does not compile\n", "c++", "cpu")
        return naive_source(None if fault == "none" else fault)
