"""The back end: supported specs, search space, default schedule, source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from itertools import product
from typing import Any

from kvgen.arch import GPUS, Target
from kvgen.errors import UnsupportedError
from kvgen.format.layout import packed_layout
from kvgen.lower.backend import Lowering, Source
from kvgen.lower.gpu import first_refusal, gpu_facts, plain_schedule, preferred_block, tiling_of, too_many_scales, wrong_target
from kvgen.lower.schedule import Params, Schedule
from kvgen.lower.space import Fact, SearchSpace
from kvgen.lower.tilelang.gemm.sizes import shared_bytes as gemm_bytes
from kvgen.lower.tilelang.isolate import lower_apart
from kvgen.lower.tilelang.render import source
from kvgen.lower.tilelang.support import REFUSALS, missing
from kvgen.lower.tilelang.traits import Traits, make_traits
from kvgen.spec import AnyWorkload, KernelSpec
from kvgen.spec.dispatch import MOST_SPLITS, Tiling

NAME = "tilelang"
RING_FACTOR = Fraction(8, 3)
"""Rings of a multiprocessor hold so many times the bytes that copies keep in flight, at least: on an H200, where 24 KB are in flight,
2-bit codes lose 6 % with rings of 36 KB.
"""
CLUSTER = 8
"""Splits of a head at most where they are one cluster."""
RINGS = ((64, 2), (128, 4), (64, 4), (128, 8), (64, 8), (32, 2), (32, 4), (32, 8))
"""(kv_tile, stages) by preference."""


class TileLangBackend(Lowering[KernelSpec]):
    """Kernels written in TileLang, at the level of single matrix instructions and cp.async."""

    name = NAME
    targets: tuple[Target, ...] = tuple(GPUS)

    def missing(self) -> str | None:
        """Why TileLang cannot be used here, with the line that installs it; None if it can."""
        return missing()

    def unsupported(self, spec: KernelSpec, target: Target) -> str | None:
        """Why the spec cannot be lowered for the target, whatever is installed; None if it can."""
        refused = wrong_target(self.targets, target) or first_refusal(REFUSALS, spec)
        return refused or too_many_scales(packed_layout(spec, preferred_block(spec), "mma"))

    def space(self, spec: KernelSpec, target: Target) -> SearchSpace:
        """`search_spaces/tilelang.yaml` for a spec and a target. Raises UnsupportedError; needs no TileLang."""
        if reason := self.unsupported(spec, target):
            raise UnsupportedError(NAME, reason)
        return SearchSpace.load(NAME, _facts(spec, target), spec.workloads)

    def default(self, spec: KernelSpec, target: Target, work: AnyWorkload | None = None) -> Schedule:
        """For all workloads: 8 warps with rings of one KV tile where they fit, 12 where codes have 2 bits; else what fits. Raises
        UnsupportedError.
        """
        del work
        return plain_schedule(NAME, spec, target, self.space(spec, target), _plain_launches(spec))

    def defaults(self, spec: KernelSpec, target: Target) -> tuple[Schedule, ...]:
        """The default."""
        return (self.default(spec, target),)

    def lower(self, spec: KernelSpec, schedule: Schedule, target: Target) -> Source:
        """Source of one variant.

        Raises UnsupportedError where spec or schedule cannot be built, ToolchainMissing without TileLang, CompileError where it fails.
        """
        if problems := self.space(spec, target).check(schedule):
            raise UnsupportedError(NAME, f"schedule {schedule}: {'; '.join(problems)}")
        return source(make_traits(spec, schedule), lower_apart(spec, schedule, target), schedule.launch, target)

    def tiling(self, spec: KernelSpec, schedule: Schedule, target: Target) -> Tiling:
        """See `Lowering`."""
        runs, traits = _runs(spec, schedule.launch.integer("q_tiles")), make_traits(spec, schedule)
        most = CLUSTER if schedule.launch.text("reduction") == "cluster" else MOST_SPLITS
        one_wave = schedule.launch.text("splits") == "wave"
        found = tiling_of(spec, schedule, target, runs=runs, one_wave=one_wave)
        tile_us = found.tile_us * traits.tile_bytes / found.tile_bytes
        return replace(found, tile_bytes=traits.tile_bytes, tile_us=tile_us, wave_bytes=traits.wave_bytes, most_splits=most)


def _runs(spec: KernelSpec, q_tiles: int) -> int:
    """CTAs that share the packed-GQA rows of a KV head."""
    return -(-spec.attention.group * spec.attention.q_len // (8 * q_tiles))


def _facts(spec: KernelSpec, target: Target) -> dict[str, Fact]:
    """What constraints may mention; all sizes in bytes."""

    @cache
    def traits(block: int, warps: int, stages: int, kv_tile: int, q_tiles: int, reduction: str = "last_cta") -> Traits:
        launch = Params(warps=warps, stages=stages, kv_tile=kv_tile, q_tiles=q_tiles, ctas_per_sm=1, exact_q=True, reduction=reduction)
        return make_traits(spec, Schedule(NAME, Params(block=block, order="mma"), launch))

    def shared_bytes(form: str, *point: Any) -> int:
        return gemm_bytes(traits(*point)) if form == "gemm" else traits(*point).shared_bytes

    def ring_bytes(block: int, warps: int, stages: int, kv_tile: int) -> int:
        return 4 * traits(block, warps, stages, kv_tile, 1).query_at

    return {
        **gpu_facts(spec, target),
        "shared_bytes": shared_bytes,
        "ring_bytes": ring_bytes,
        "runs": partial(_runs, spec),
        "least_ring": int(RING_FACTOR * GPUS[target].bytes_in_flight),
    }


def _plain_launches(spec: KernelSpec) -> Iterator[Params]:
    """Launches that no shape is bad at, the best first. 2-bit codes are short of issue slots: more warps, where registers allow it."""
    tiles = 2 if spec.attention.group * spec.attention.q_len > 8 and spec.attention.head_dim <= 128 else 1
    narrow = [(12, (128, 4)), (8, (128, 4))] if spec.key.bits == spec.value.bits == 2 else []
    for warps, (kv_tile, stages) in (*narrow, *product((8, 4, 2), RINGS)):
        launch = {"warps": warps, "stages": stages, "kv_tile": kv_tile, "q_tiles": tiles, "ctas_per_sm": 1}
        yield Params(launch, form="mma", exact_q=True, splits="automatic", reduction="last_cta")
