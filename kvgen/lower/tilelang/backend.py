"""The back end's answers: what it supports, its search space, its default, its source."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

from kvgen.errors import UnsupportedError
from kvgen.lower.base import Source, Target
from kvgen.lower.schedule import Params, Schedule
from kvgen.lower.space import Fact, SearchSpace, spec_facts
from kvgen.lower.tilelang.gemm.sizes import shared_bytes as gemm_bytes
from kvgen.lower.tilelang.isolate import lower_apart
from kvgen.lower.tilelang.plan import Plan, make_plan
from kvgen.lower.tilelang.render import source
from kvgen.lower.tilelang.support import missing, refusal
from kvgen.spec import KernelSpec

NAME = "tilelang"
KB = 1024
SHARED_PER_CTA: dict[Target, int] = {"sm80": 163 * KB, "sm89": 99 * KB, "sm90": 227 * KB}
SHARED_RESERVED = KB
"""Shared memory of a multiprocessor that every CTA costs beyond its own."""
IN_FLIGHT: dict[Target, int] = {"sm80": 32 * KB, "sm89": 16 * KB, "sm90": 64 * KB}
"""Rings of a multiprocessor, at least: 2-bit codes lose 6 % with 36 KB on an H200. Others in proportion to their memory's speed."""
PROCESSORS: dict[Target, int] = {"sm80": 108, "sm89": 128, "sm90": 132}
"""Multiprocessors of the usual GPU of a target: for the search, not for the launch."""
RINGS = ((64, 2), (128, 4), (64, 4), (128, 8), (64, 8), (32, 2), (32, 4), (32, 8))
"""(kv_tile, stages) by preference."""


class TileLangBackend:
    """Kernels written in TileLang, at the level of single matrix instructions and cp.async."""

    name = NAME
    targets: tuple[Target, ...] = ("sm90", "sm89", "sm80")

    def missing(self) -> str | None:
        """Why TileLang cannot be used here, with the line that installs it; None if it can."""
        return missing()

    def unsupported(self, spec: KernelSpec, target: Target) -> str | None:
        """Why the spec cannot be lowered for the target, whatever is installed; None if it can."""
        if target not in self.targets:
            return f"it lowers for {', '.join(self.targets)}, not for {target}"
        return refusal(spec)

    def space(self, spec: KernelSpec, target: Target) -> SearchSpace:
        """`search_spaces/tilelang.yaml` for a spec and a target. Raises UnsupportedError; needs no TileLang."""
        _require(spec, target)
        return SearchSpace.load(NAME, _facts(spec, target), spec.workloads)

    def default(self, spec: KernelSpec, target: Target) -> Schedule:
        """8 warps with rings of one KV tile where they fit, 12 where codes have 2 bits; else what fits. Raises UnsupportedError."""
        hinted = self.space(spec, target)
        preferred = max(128, spec.key.group) if spec.key.axis == "channel" else 128
        for space in (hinted, hinted.without_hints()):
            for layout in sorted(space.layouts(), key=lambda point: abs(point.integer("block") - preferred)):
                for launch in _plain_launches(spec):
                    schedule = Schedule(NAME, layout, launch)
                    if not any(space.doubts(schedule, workload) for workload in spec.workloads):
                        return schedule
        raise UnsupportedError(NAME, f"no schedule of {spec.name} fits {target} and all its workloads")

    def lower(self, spec: KernelSpec, schedule: Schedule, target: Target) -> Source:
        """Source of one variant.

        Raises UnsupportedError where spec or schedule cannot be built, ToolchainMissing without TileLang, CompileError where it fails.
        """
        if problems := self.space(spec, target).check(schedule):
            raise UnsupportedError(NAME, problems[0])
        return source(make_plan(spec, schedule), lower_apart(spec, schedule, target), schedule.launch, target)


def _require(spec: KernelSpec, target: Target) -> None:
    reason = refusal(spec) if target in SHARED_PER_CTA else f"it lowers for {', '.join(SHARED_PER_CTA)}, not for {target}"
    if reason:
        raise UnsupportedError(NAME, reason)


def _facts(spec: KernelSpec, target: Target) -> dict[str, Fact]:
    """What constraints may mention beyond the spec's own facts; all sizes in bytes."""

    @cache
    def plan(block: int, warps: int, stages: int, kv_tile: int, q_tiles: int) -> Plan:
        launch = Params(warps=warps, stages=stages, kv_tile=kv_tile, q_tiles=q_tiles, ctas_per_sm=1, exact_q=True, reduction="cluster")
        return make_plan(spec, Schedule(NAME, Params(block=block, order="mma"), launch))

    def shared_bytes(form: str, *point: int) -> int:
        return gemm_bytes(plan(*point)) if form == "gemm" else plan(*point).shared_bytes

    def ring_bytes(block: int, warps: int, stages: int, kv_tile: int) -> int:
        return 4 * plan(block, warps, stages, kv_tile, 1).query_at

    def runs(q_tiles: int) -> int:
        return -(-q_rows // (8 * q_tiles))

    q_rows = spec.attention.group * spec.attention.q_len

    return {
        **spec_facts(spec),
        "shared_bytes": shared_bytes,
        "ring_bytes": ring_bytes,
        "runs": runs,
        "target": target,
        "q_rows": q_rows,
        "processors": PROCESSORS[target],
        "in_flight": IN_FLIGHT[target],
        "shared_per_cta": SHARED_PER_CTA[target],
        "shared_per_sm": SHARED_PER_CTA[target] + SHARED_RESERVED,
        "shared_reserved": SHARED_RESERVED,
    }


def _plain_launches(spec: KernelSpec) -> Iterator[Params]:
    """Launches that no shape is bad at, the best first. 2-bit codes are short of issue slots: more warps, where registers allow it."""
    tiles = 2 if spec.attention.group * spec.attention.q_len > 8 and spec.attention.head_dim <= 128 else 1
    narrow = [(12, (128, 4)), (8, (128, 4))] if spec.key.bits == spec.value.bits == 2 else []
    for warps, (kv_tile, stages) in (*narrow, *product((8, 4, 2), RINGS)):
        launch = {"warps": warps, "stages": stages, "kv_tile": kv_tile, "q_tiles": tiles, "ctas_per_sm": 1}
        yield Params(launch, form="mma", exact_q=True, splits="automatic", reduction="last_cta")
