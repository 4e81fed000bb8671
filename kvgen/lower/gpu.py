"""What the GPU back ends share: facts of specs and architectures, memory for packing, refusals, the plain schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from kvgen.arch import CTA_RESERVED, GPUS, KB, Target
from kvgen.errors import UnsupportedError
from kvgen.format.layout import PackedLayout, packed_layout
from kvgen.format.sizes import near_128, smallest_block
from kvgen.lower.schedule import Params, Schedule, layout_of
from kvgen.lower.space import Fact, SearchSpace, spec_facts
from kvgen.spec import KernelSpec
from kvgen.spec.dispatch import MOST_WAVES, Tiling

LATENCY_US = 0.7
"""Of memory: a multiprocessor reads its `bytes_in_flight` in this time."""
MAX_BATCH = 2048
"""Sequences per call: the CTA that computes a plan keeps their positions in shared memory (`kMaxPlanBatch`)."""
MOST_PACK = 48 * KB
"""Shared memory of a kernel that does not ask for more."""
MAX_QUERIES = 8
MAX_Q_ROWS = 128
MAX_HEAD_DIM = 512


def gpu_facts(spec: KernelSpec, target: Target) -> dict[str, Fact]:
    """Facts of a spec and of a target's architecture; all sizes in bytes. `q_rows` counts packed-GQA rows."""
    gpu, usual, smallest = GPUS[target], packed_layout(spec, preferred_block(spec), "mma"), smallest_block(spec)
    return {
        **spec_facts(spec),
        "q_rows": spec.attention.group * spec.attention.q_len,
        "target": target,
        "bulk_copies": gpu.bulk_copies,
        "clusters": gpu.clusters,
        "processors": gpu.sms,
        "shared_per_cta": gpu.shared_per_cta,
        "shared_per_sm": gpu.shared_per_sm,
        "cta_reserved": CTA_RESERVED,
        "in_flight": gpu.bytes_in_flight,
        "smallest_block": smallest,
        "odd_factor": smallest // (smallest & -smallest),
        "max_batch": MAX_BATCH,
        "most_pack": MOST_PACK,
        "pack_bytes": lambda block: pack_memory(replace(usual, tokens=block)),  # asked for blocks that cannot be, too
        "staged_bytes": lambda block: staged_memory(replace(usual, tokens=block)),
    }


def preferred_block(spec: KernelSpec) -> int:
    """Tokens of a packed block that suit most specs: 128 or a little less, or the smallest block."""
    return near_128(smallest_block(spec))


def tiling_of(spec: KernelSpec, schedule: Schedule, target: Target, *, runs: int, cluster: int = 1, one_wave: bool = False) -> Tiling:
    """How a schedule divides calls among the CTAs of the usual GPU of a target. `runs` CTAs share the packed-GQA rows of a KV head,
    `cluster` CTAs the KV tiles of a split; `one_wave`: the kernel chooses no more splits than run at once.
    """
    kv_tile, ctas = schedule.launch.integer("kv_tile"), schedule.launch.integer("ctas_per_sm")
    layout, window = layout_of(spec, schedule.layout), spec.attention.window
    tile_bytes = layout.block_bytes * kv_tile // layout.tokens
    return Tiling(
        heads=spec.attention.kv_heads * runs,
        resident=GPUS[target].resident(cluster) * ctas,
        ctas_per_sm=ctas,
        step_tokens=kv_tile * cluster,
        tile_bytes=tile_bytes,
        tile_us=tile_bytes * ctas * LATENCY_US / GPUS[target].bytes_in_flight,
        most_waves=1 if one_wave else MOST_WAVES,
        visible=window + kv_tile if window else None,
    )


def plain_schedule(name: str, spec: KernelSpec, target: Target, hinted: SearchSpace, launches: Iterable[Params]) -> Schedule:
    """The first of these launches, the best first, that all workloads allow, with the block nearest to the preferred one; against the hints
    of the space if none is within them. Raises UnsupportedError for the back end `name`.
    """
    tried: list[list[str]] = []
    ranked = list(launches)
    for space in (hinted, hinted.without_hints()):
        for layout in sorted(space.layouts(), key=lambda point: abs(point.integer("block") - preferred_block(spec))):
            for launch in ranked:
                schedule = Schedule(name, layout, launch)
                tried.append([problem for workload in spec.workloads for problem in space.doubts(schedule, workload)])
                if not tried[-1]:
                    return schedule
    common = [problem for problem in tried[0] if all(problem in problems for problems in tried)] if tried else ["no block fits"]
    raise UnsupportedError(name, f"no plain schedule suits {target} and every workload: {(common or tried[0])[0]}")


# --- memory ------------------------------------------------------------------------------------------------------------


def pack_memory(layout: PackedLayout) -> int:
    """Bytes of shared memory for packing a block: per channel, extremes of runs of 16 tokens, and params of groups; of K, for the boost,
    four sums of magnitudes and a sort key per channel, as far as the selector needs them, and which channels are chosen per group.

    Every module asserts that its headers need as many (`pack_smem_bytes`).
    """
    needed = [16]
    for op in (layout.key, layout.value):
        if op.per_channel:
            boosting, groups = 0, layout.tokens // op.group
            if op.boost is not None:
                doubles = {"mean_abs": 5, "range": 1, "static": 0}[op.boost.select]
                boosting = layout.head_dim * (doubles * 8 + groups) + groups * op.boosted
            needed.append(layout.head_dim * (layout.tokens // 16 * 4 + groups * 12) + boosting)
    return max(needed)


def staged_memory(layout: PackedLayout) -> int:
    """Bytes of shared memory besides, in which the tokens of a block lie rotated while they are packed: of K, then of V."""
    return layout.tokens * layout.head_dim * layout.param_bytes if any(op.rotation for op in layout.operands) else 0


def too_many_scales(layout: PackedLayout) -> str | None:
    """Why a packing kernel's shared memory does not hold the scales of a block, or None."""
    if pack_memory(layout) <= MOST_PACK:
        return None
    groups = [f"{name}.group {op.group}" for name, op in (("key", layout.key), ("value", layout.value)) if op.per_channel]
    what = f"head_dim {layout.head_dim} with {' and '.join(groups)} needs blocks of {layout.tokens} tokens"
    return f"{what}, and packing one needs {pack_memory(layout)} bytes of shared memory, more than {MOST_PACK}"


# --- refusals ----------------------------------------------------------------------------------------------------------


def refused(reasons: Iterable[str], spec: KernelSpec, target: Target) -> str | None:
    """Why a back end for GPUs with these reasons does not lower a spec for the target, or None."""
    found = wrong_target(tuple(GPUS), target) or next(iter(reasons), None)
    return found or too_many_scales(packed_layout(spec, preferred_block(spec), "mma"))


def wrong_target(targets: Sequence[Target], target: Target) -> str | None:
    """Why a back end for some targets has no code for `target`, or None."""
    return None if target in targets else f"it lowers for {', '.join(targets)}, not for {target}"


def gpu_refusals(spec: KernelSpec) -> Iterator[str]:
    """What neither back end for GPUs computes."""
    a = spec.attention
    if a.dtype == "float32":
        yield "attention.dtype is float32, and matrix instructions take 16 bits"
    if a.head_dim > MAX_HEAD_DIM:
        yield f"attention.head_dim ({a.head_dim}) is more than {MAX_HEAD_DIM}, for which registers suffice"
    if a.q_len > MAX_QUERIES:
        yield f"attention.q_len ({a.q_len}) is more than {MAX_QUERIES}, which a decode kernel holds at once; longer calls need no q_len"
    for name, quant in (("key", spec.key), ("value", spec.value)):
        if quant.per_token and quant.group % 16:
            yield f"{name}.group ({quant.group} channels) must be a multiple of 16"
    if a.group * a.q_len > MAX_Q_ROWS:
        yield f"{a.group} query heads times {a.q_len} query tokens share a KV head, more than {MAX_Q_ROWS} rows"
