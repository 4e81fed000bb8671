"""Lowering of linear layers over packed weights. A launch is compiled for a number of rows of x, its parameter `rows`, and takes calls with
as many or fewer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvgen.arch import GPUS, Target
from kvgen.lower.operation import CPU_ELEMENTS, NO_LAYOUT, OperationLowering
from kvgen.lower.schedule import Params, Schedule
from kvgen.lower.space import Fact
from kvgen.spec import AnyWorkload, LinearFormat, LinearShape, LinearSpec

MOST_DEFAULTS = 5
TILE_ROWS, FEW_ROWS = 16, 16
"""Of a tile of W, and of x for which launches copy it by multicast."""
REGISTERS, SCHEDULERS = 65536, 4
"""Of a multiprocessor; a scheduler issues for every fourth warp, and has a quarter of the registers."""
MANY_WARPS, CLUSTER_BYTES = 10, 1 << 20
"""Warps of a CTA that hide the latency of what each does in turn, two fewer where they copy no x; what memory could read while a cluster
adds its sums, for each of its CTAs.
"""

Launches = Callable[[LinearSpec, Target, int], Params]
"""The launch of the defaults for a spec, a target and a number of rows."""


@dataclass(frozen=True)
class LinearLowering(OperationLowering[LinearSpec]):
    """Of a back end."""

    operation = "linear"
    functions = ("linear",)

    rows: Sequence[int]
    """What the defaults are compiled for: as many as cover the spec's workloads."""
    plain: Launches

    def unsupported(self, spec: LinearSpec, target: Target) -> str | None:
        if reason := super().unsupported(spec, target):
            return reason
        if spec.linear.dtype not in self.elements:
            return f"linear.dtype is {spec.linear.dtype}, and its kernels multiply {' and '.join(self.elements)}"
        return None

    def facts(self, spec: LinearSpec, target: Target) -> Mapping[str, Fact]:
        linear = spec.linear
        facts: dict[str, Fact] = {"n": linear.n, "k": linear.k, "bits": linear.bits, "dtype": linear.dtype}
        facts |= {"group": group_of(linear), "zero": linear.zero, "gated": linear.epilogue == "silu_mul"}
        return facts if target == "cpu" else {**facts, **_cuda_facts(spec, target)}

    def context(self, spec: LinearSpec, target: Target) -> Mapping[str, Any]:
        linear = spec.linear
        names = {name: getattr(linear, name) for name in ("n", "k", "bits", "zero", "bias", "epilogue")}
        told = f"{linear.n} x {linear.k}, {linear.bits} bits, {linear.dtype}"
        return {**names, "format": told, "group": group_of(linear), "overlap": target in GPUS and GPUS[target].dependent_launch}

    def defaults(self, spec: LinearSpec, target: Target) -> tuple[Schedule, ...]:
        """A launch for each number of rows that a workload needs. Raises UnsupportedError."""
        self.require(spec, target)
        needed = {min(rows for rows in self.rows if rows >= work.rows) for work in spec.workloads}
        launches = dict.fromkeys(self.plain(spec, target, rows) for rows in sorted(needed, reverse=True)[:MOST_DEFAULTS])
        return tuple(Schedule(self.name, NO_LAYOUT, launch) for launch in launches)

    def default(self, spec: LinearSpec, target: Target, work: AnyWorkload | None = None) -> Schedule:
        """Of the defaults, that of the fewest rows that cover a workload, the spec's first if none is given."""
        m = work.rows if isinstance(work, LinearShape) else spec.workloads[0].rows
        fitting = [one for one in self.defaults(spec, target) if rows_of(one.launch) >= m]
        return min(fitting or self.defaults(spec, target), key=lambda one: rows_of(one.launch))


def rows_of(launch: Params) -> int:
    """The most rows of a call that a launch takes."""
    return launch.integer("rows")


def group_of(linear: LinearFormat) -> int:
    """Channels that share a scale; 0 for all of a row."""
    return linear.group if isinstance(linear.group, int) else 0


# --- CUDA ----------------------------------------------------------------------------------------------------------------


def stage_channels(linear: LinearFormat) -> int:
    """Channels of a stage of the CUDA kernels (`kStage` of linear/warp_weights.cuh)."""
    return 128 if linear.k % 128 == 0 else 64


CHUNK = 4
"""Stages of a bulk copy of x (`kChunk` of linear/inputs.cuh)."""


def shared_bytes(linear: LinearFormat, launch: Mapping[str, Any]) -> int:
    """Shared memory of a CTA (`shared_bytes` of linear/kernel.cuh): rings of weights and x, or the sums in their place."""
    rows, tiles, warps_k = int(launch["rows"]), int(launch["tiles"] * launch["warps_n"]), int(launch["warps_k"])
    stage, group = stage_channels(linear), group_of(linear)
    unit = group or 64
    unit_bytes = 2 * unit * linear.bits + (16 * (2 + linear.zero) if group else 0)
    padding = 0 if launch["product"] == "wgmma" else 16
    slot, resident = tiles * (stage // unit) * unit_bytes, 0
    if launch["multicast"]:
        stages = -(-linear.k // stage // int(launch["split"]))
        resident = rows * (2 * stage * stages + padding) + 8 * -(-stages // CHUNK)
    else:
        slot += rows * (2 * stage + padding)
    return max(warps_k * int(launch["stages"]) * slot + resident, warps_k * rows * 4 * (16 * tiles + 4))


def registers(linear: LinearFormat, launch: Mapping[str, Any]) -> int:
    """About as many as a thread of the CUDA kernels needs: sums, fragments of x or of expanded weights, and the rest."""
    columns, tiles, runs = int(launch["rows"]) // 8, int(launch["tiles"]), (group_of(linear) or 64) // 64
    sums, inputs = 4 * tiles * columns, 8 * columns * runs
    if launch["product"] == "wgmma":
        return sums + 20 * tiles + 44
    if columns <= 2:
        return 2 * sums + inputs + 32  # the compiler keeps the sums of a group apart for every tile
    return sums + 44 + (inputs + 4 * columns if columns <= 4 else 16 * tiles + 8)


def _cuda_facts(spec: LinearSpec, target: Target) -> dict[str, Fact]:
    gpu, linear = GPUS[target], spec.linear
    names = ("product", "rows", "tiles", "warps_n", "warps_k", "stages", "split", "multicast")
    return {
        "clusters": gpu.clusters,
        "processors": gpu.sms,
        "shared_per_cta": gpu.shared_per_cta,
        "shared_per_sm": gpu.shared_per_sm,
        "all_stages": linear.k // stage_channels(linear),
        "shared_bytes": lambda *launch: shared_bytes(linear, dict(zip(names, launch, strict=True))),
        "registers": lambda *launch: registers(linear, dict(zip(names[:3], launch, strict=True))),
    }


def _on_gpus(spec: LinearSpec, target: Target, rows: int) -> Params:
    """The first launch whose clusters leave no multiprocessor without a place, or copy x by multicast."""
    return next(launch for launch in launches(spec, target, rows) if launch.integer("split") <= 2 or launch["multicast"])


def launches(spec: LinearSpec, target: Target, rows: int) -> list[Params]:
    """Launches for so many rows, those first whose CTAs keep the multiprocessors busy and read the fewest bytes. Every CTA reads the x of
    its channels: wide ones, clusters that share the channels, and those that copy x by multicast, read less of it in all.
    """
    linear, gpu = spec.linear, GPUS[target]
    product = "wgmma" if gpu.clusters and rows >= 64 else "mma"
    all_stages, all_tiles = linear.k // stage_channels(linear), linear.n // TILE_ROWS
    splits = (1, 2, 4) if gpu.clusters and all_stages >= 8 else (1,)

    def warps_of(launch: Params) -> int:
        return launch.integer("warps_n") * launch.integer("warps_k")

    def even(warps: int) -> int:
        """With the places that the schedulers of fewer warps leave empty."""
        return -(-warps // SCHEDULERS) * SCHEDULERS

    def fits(launch: Params) -> bool:
        warps, groups = warps_of(launch), launch.integer("split") * launch.integer("warps_k")
        each = max(registers(linear, launch), 64)
        room = each <= 255 and 32 * even(warps) * each <= REGISTERS and warps <= 16 and shared_bytes(linear, launch) <= gpu.shared_per_cta
        used = product == "wgmma" or launch.integer("stages") <= max(2, -(-all_stages // groups))
        return room and used and groups <= all_stages

    def speed(launch: Params) -> float:
        blocks, split, share = launch.integer("tiles") * launch.integer("warps_n"), launch.integer("split"), 2 if launch["multicast"] else 1
        clusters = -(-all_tiles // (blocks * share))
        busy = all_tiles * split / (blocks * gpu.sms * -(-clusters // gpu.resident(split * share)))
        warps = warps_of(launch)
        if product == "mma":
            busy *= 0.94 ** max(0, MANY_WARPS - 2 * (share - 1) - warps)
        if rows > FEW_ROWS:
            busy *= warps / even(warps)  # products take the time, not copies
        weights, inputs = linear.n * linear.k * linear.bits / 8, clusters * rows * linear.k  # half of x's bytes, which L2 has
        return busy / (weights + inputs + (CLUSTER_BYTES * split * share if split > 1 else 0))

    found: list[Params] = []
    for split, multicast in itertools.product(splits, (False, True) if gpu.clusters and rows <= FEW_ROWS else (False,)):
        for tiles, warps_n in SHAPES["multicast" if multicast else product]:
            usual = Params(product=product, rows=rows, tiles=tiles, warps_n=warps_n, split=split, multicast=multicast, ctas=1)
            if linear.epilogue != "silu_mul" or tiles * warps_n % 2 == 0:
                found += filter(fits, (Params(usual, warps_k=warps_k, stages=stages) for warps_k, stages in RINGS[product]))
    return sorted(found, key=speed, reverse=True)


SHAPES = {
    "mma": ((1, 1), (2, 1), (3, 1), (2, 2), (5, 1), (3, 2), (7, 1), (4, 2), (3, 3), (5, 2), (6, 2), (7, 2), (4, 4), (2, 7)),
    "multicast": ((2, 1), (3, 1), (7, 2), (2, 7), (5, 3)),
    "wgmma": ((1, 4), (1, 8), (2, 8), (1, 12)),
}
"""Tiles of a warp and warps along n of the default launches. Those with multicast were faster with it on an H200, at some shape."""
RINGS = {
    "mma": tuple((warps_k, stages) for warps_k in (16, 8, 7, 5, 4, 2, 1) for stages in (4, 3, 2)),
    "wgmma": tuple((warps_k, stages) for warps_k in (2, 1) for stages in (4, 3)),
}
"""Warps along k and stages, the best that fit first."""

CUDA = LinearLowering("cuda", tuple(GPUS), {"float16": "Half", "bfloat16": "Bfloat"}, (8, 16, 32, 64, 128), _on_gpus)
"""Matrix instructions whose A operand are the expanded codes."""


# --- CPU -----------------------------------------------------------------------------------------------------------------


def _on_cpus(spec: LinearSpec, target: Target, rows: int) -> Params:
    """Whole blocks, 16 KB ahead of the products; AMX where it is faster than integers."""
    del target
    floats = spec.linear.dtype == "float32"
    return Params(rows=rows, dot="fp32" if floats else "int16", tiles=4, amx_rows=129 if floats else 4, prefetch=32 // spec.linear.bits)


CPU = LinearLowering("cpu", ("cpu",), CPU_ELEMENTS, (128,), _on_cpus)
"""Integers or parts of bfloat16 over vector and matrix instructions, or floats."""
