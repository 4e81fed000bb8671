"""Facts that search spaces of every GPU back end may mention."""

from __future__ import annotations

from dataclasses import replace

from kvgen.arch import CTA_RESERVED, GPUS, Target
from kvgen.format.layout import packed_layout
from kvgen.format.sizes import near_128, smallest_block
from kvgen.lower.pack_memory import MOST_PACK, pack_memory
from kvgen.lower.schedule import Schedule, layout_of
from kvgen.lower.space import Fact, spec_facts
from kvgen.spec import KernelSpec
from kvgen.spec.dispatch import MOST_WAVES, Tiling

LATENCY_US = 0.7
"""Of memory: a multiprocessor reads its `bytes_in_flight` in this time."""
MAX_BATCH = 2048
"""Sequences per call: the CTA that computes a plan keeps their positions in shared memory (`kMaxPlanBatch`)."""


def gpu_facts(spec: KernelSpec, target: Target) -> dict[str, Fact]:
    """Facts of a spec and of a target's architecture; all sizes in bytes. `q_rows` counts packed-GQA rows."""
    gpu, usual = GPUS[target], packed_layout(spec, preferred_block(spec), "mma")
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
        "smallest_block": smallest_block(spec),
        "odd_factor": odd_factor(smallest_block(spec)),
        "max_batch": MAX_BATCH,
        "most_pack": MOST_PACK,
        "pack_bytes": lambda block: pack_memory(replace(usual, tokens=block)),  # asked for blocks that cannot be, too
    }


def tiling_of(
    spec: KernelSpec,
    schedule: Schedule,
    target: Target,
    *,
    runs: int,
    cluster: int = 1,
    one_wave: bool = False,
) -> Tiling:
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


def odd_factor(number: int) -> int:
    """What remains of a positive number without its powers of two."""
    return number // (number & -number)


def preferred_block(spec: KernelSpec) -> int:
    """Tokens of a packed block that suit most specs: 128 or a little less, or the smallest block."""
    return near_128(smallest_block(spec))
