"""The back end: supported specs, search space, default schedule, source."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache

from kvgen.arch import GPUS, KB, Target
from kvgen.errors import UnsupportedError
from kvgen.format.layout import packed_layout
from kvgen.lower.backend import Source
from kvgen.lower.cuda.default import coarse_values, further_launches, plain_launches
from kvgen.lower.cuda.render import source
from kvgen.lower.cuda.rows import rows_of_cta, runs
from kvgen.lower.cuda.shared import SharedMemory, cluster_size, shared_memory
from kvgen.lower.cuda.support import REFUSALS
from kvgen.lower.gpu_facts import gpu_facts, preferred_block, tiling_of
from kvgen.lower.pack_memory import too_many_scales
from kvgen.lower.plain import plain_schedule
from kvgen.lower.refusals import first_refusal, wrong_target
from kvgen.lower.schedule import Params, Schedule, layout_of
from kvgen.lower.space import Fact, SearchSpace
from kvgen.spec import AnyWorkload, KernelSpec, Workload
from kvgen.spec.dispatch import Tiling
from kvgen.spec.workloads import mean_length

NAME = "cuda"
REMEMBERED = 16
"""Specs whose search space and defaults are kept, since the default of every workload asks for them."""
MOST_RING = 168 * KB
"""Rings of a multiprocessor that a search tries, at most: more gained nothing on an H200."""


class CudaBackend:
    """Kernels of mma.sync, cp.async and (SM90) bulk copies."""

    name = NAME
    targets: tuple[Target, ...] = tuple(GPUS)

    def missing(self) -> str | None:
        """None: what it needs comes with kvgen."""
        return None

    def unsupported(self, spec: KernelSpec, target: Target) -> str | None:
        """Why the spec cannot be lowered for the target; None if it can."""
        refused = wrong_target(self.targets, target) or first_refusal(REFUSALS, spec)
        return refused or too_many_scales(packed_layout(spec, preferred_block(spec), "mma"))

    def space(self, spec: KernelSpec, target: Target) -> SearchSpace:
        """`search_spaces/cuda.yaml` for a spec and a target. Raises UnsupportedError."""
        self._require(spec, target)
        return _space(spec, target)

    def default(self, spec: KernelSpec, target: Target, work: AnyWorkload | None = None) -> Schedule:
        """See `Lowering`."""
        space, asked = self.space(spec, target), work if isinstance(work, Workload) else spec.workloads[0]
        plain, *further = self.defaults(spec, target)
        allowed = [plain, *(schedule for schedule in further if not space.doubts(schedule, asked))]
        equal = asked.shortest == asked.kv_len

        def modelled(schedule: Schedule) -> float:
            return self.tiling(spec, schedule, target).us(asked.batch, mean_length(asked), equal=equal or asked.batch == 1)

        return min(allowed, key=modelled)

    def defaults(self, spec: KernelSpec, target: Target) -> tuple[Schedule, ...]:
        """See `Lowering`; one for GPUs without clusters, where no other was measured."""
        self._require(spec, target)
        return _defaults(spec, target)

    def lower(self, spec: KernelSpec, schedule: Schedule, target: Target) -> Source:
        """Source of one variant. Raises UnsupportedError where spec or schedule cannot be built."""
        self._require(spec, target)
        if problems := self.space(spec, target).check(schedule):
            raise UnsupportedError(NAME, f"schedule {schedule}: {'; '.join(problems)}")
        layout = layout_of(spec, schedule.layout)
        return source(spec, layout, schedule.launch, target)

    def tiling(self, spec: KernelSpec, schedule: Schedule, target: Target) -> Tiling:
        """See `Lowering`. The splits of a launch with clusters run at once."""
        cluster = cluster_size(schedule.launch.text("reduction"))
        return tiling_of(spec, schedule, target, runs=runs(spec), cluster=cluster, one_wave=cluster > 1)

    def _require(self, spec: KernelSpec, target: Target) -> None:
        if reason := self.unsupported(spec, target):
            raise UnsupportedError(NAME, reason)


@lru_cache(maxsize=REMEMBERED)
def _space(spec: KernelSpec, target: Target) -> SearchSpace:
    return SearchSpace.load(NAME, _facts(spec, target), spec.workloads)


@lru_cache(maxsize=REMEMBERED)
def _defaults(spec: KernelSpec, target: Target) -> tuple[Schedule, ...]:
    space = _space(spec, target)
    plain = plain_schedule(NAME, spec, target, space, plain_launches(spec))
    if not GPUS[target].clusters:
        return (plain,)
    found = [plain]
    for launches in further_launches(spec):
        schedules = (Schedule(NAME, plain.layout, launch) for launch in launches)
        found += [schedule for schedule in schedules if not space.doubts(schedule)][:1]
    return tuple(dict.fromkeys(found))


def _facts(spec: KernelSpec, target: Target) -> dict[str, Fact]:
    """What constraints may mention; all sizes in bytes."""
    usual = packed_layout(spec, preferred_block(spec), "mma")

    @cache
    def memory(block: int, warps: int, kv_tile: int, tiles_in_flight: int, copy: str, reduction: str = "last_cta") -> SharedMemory:
        layout = replace(usual, tokens=block)  # asked for blocks that cannot be, too
        launch = Params(warps=warps, kv_tile=kv_tile, tiles_in_flight=tiles_in_flight, copy=copy, reduction=reduction)
        return shared_memory(spec, layout, launch)

    return {
        **gpu_facts(spec, target),
        "boosted": spec.key.boost.fraction > 0,
        "cta_rows": rows_of_cta(spec),
        "integer_keys": _integer_keys(spec),
        "coarse_values": coarse_values(spec),
        "runs": runs(spec),
        "resident": lambda reduction: GPUS[target].resident(cluster_size(reduction)),
        "most_ring": MOST_RING,
        "shared_bytes": lambda *point: memory(*point).total,
        "ring_bytes": lambda *point: memory(*point).ring,
    }


def _integer_keys(spec: KernelSpec) -> bool:
    """Whether K's codes meet the query as integers without `exact_q`, in KV tiles of more than 32 tokens (traits.cuh)."""
    key = spec.key
    return key.per_channel and key.bits <= 4 and key.group % 64 == 0 and not key.boost.fraction and rows_of_cta(spec) <= 4
