"""The back end's answers: what it supports, its search space, its default, its source."""

from __future__ import annotations

from kvgen.errors import UnsupportedError
from kvgen.lower.base import Source, Target
from kvgen.lower.cuda.machine import CTA_RESERVED, MACHINES, REGISTERS
from kvgen.lower.cuda.render import render
from kvgen.lower.cuda.shared import MAX_BATCH, Shared, shared_memory
from kvgen.lower.cuda.support import refusal
from kvgen.lower.schedule import Params, Schedule
from kvgen.lower.space import Fact, SearchSpace, spec_facts
from kvgen.reference.layout import PackedLayout, packed_layout
from kvgen.spec import KernelSpec

NAME = "cuda"


class CudaBackend:
    """Kernels of mma.sync, cp.async and (SM90) bulk copies."""

    name = NAME
    targets: tuple[Target, ...] = ("sm90", "sm89", "sm80")

    def unsupported(self, spec: KernelSpec, target: Target) -> str | None:
        """Why the spec cannot be lowered for the target; None if it can."""
        if target not in self.targets:
            return f"it lowers for {', '.join(self.targets)}, not for {target}"
        return refusal(spec)

    def space(self, spec: KernelSpec, target: Target) -> SearchSpace:
        """`search_spaces/cuda.yaml` for a spec and a target. Raises UnsupportedError."""
        self._require(spec, target)
        return SearchSpace.load(NAME, _facts(spec, target), spec.workloads)

    def default(self, spec: KernelSpec, target: Target) -> Schedule:
        """The first point of the space, by the order of preference below, that is allowed for every workload."""
        space = self.space(spec, target)
        for layout in sorted(space.layout_points(), key=lambda p: abs(p.integer("block") - _preferred_block(spec))):
            allowed = [p for w in spec.workloads for p in space.launch_points(layout, w)]
            common = [p for p in dict.fromkeys(allowed) if allowed.count(p) == len(spec.workloads) and _plain(p)]
            if common:
                return Schedule(NAME, layout, min(common, key=_preference))
        raise UnsupportedError(NAME, f"no schedule fits the shared memory and registers of {target}")

    def layout(self, spec: KernelSpec, params: Params) -> PackedLayout:
        """Blocks of `block` tokens in fragment order."""
        return packed_layout(spec, params.integer("block"), "mma")

    def lower(self, spec: KernelSpec, schedule: Schedule, target: Target) -> Source:
        """Source of one variant. Raises UnsupportedError where spec or schedule cannot be built."""
        self._require(spec, target)
        if problems := self.space(spec, target).check(schedule):
            raise UnsupportedError(NAME, problems[0])
        layout = self.layout(spec, schedule.layout)
        return render(spec, layout, schedule.launch, shared_memory(spec, layout, schedule.launch), target)

    def _require(self, spec: KernelSpec, target: Target) -> None:
        if reason := self.unsupported(spec, target):
            raise UnsupportedError(NAME, reason)


def _facts(spec: KernelSpec, target: Target) -> dict[str, Fact]:
    """What constraints may mention beyond the spec's own facts; all sizes in bytes."""
    machine = MACHINES[target]

    def memory(block: int, warps: int, unit: int, depth: int, copy: str) -> Shared:
        return shared_memory(spec, packed_layout(spec, block, "mma"), Params(warps=warps, unit=unit, depth=depth, copy=copy))

    return {
        **spec_facts(spec),
        "target": target,
        "columns": spec.attention.group * spec.attention.q_len,
        "bulk_copies": machine.bulk,
        "shared_per_cta": machine.shared_per_cta,
        "shared_per_sm": machine.shared_per_sm,
        "cta_reserved": CTA_RESERVED,
        "in_flight": machine.in_flight,
        "sm_registers": REGISTERS,
        "sm_warps": machine.warps,
        "max_batch": MAX_BATCH,
        "shared_bytes": lambda *point: memory(*point).total,
        "ring_bytes": lambda *point: memory(*point).ring,
    }


def _preferred_block(spec: KernelSpec) -> int:
    return spec.key.group if spec.key.quantized and spec.key.axis == "channel" else 128


def _plain(launch: Params) -> bool:
    """No choice that only some shapes like."""
    return launch["copy"] == "async" and launch["combine"] == "last" and launch["split"] == "automatic" and launch["exact_q"] is True


def _preference(launch: Params) -> tuple[int, ...]:
    """Smaller is better: 8 warps in one CTA, four stages in one unit."""
    warps, unit, depth = (launch.integer(name) for name in ("warps", "unit", "depth"))
    return (abs(warps - 8), launch.integer("ctas"), abs(unit * depth - 4), -unit)
