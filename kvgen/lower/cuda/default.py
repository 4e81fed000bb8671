"""Launches that are taken without measuring: for a workload, and plain ones, for all calls.

What suits a workload was measured on an H200; docs/decisions/0032-the-default-follows-the-workloads.md has the figures.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvgen.arch import GPUS, Target
from kvgen.lower.cuda.rows import q_tiles, runs
from kvgen.lower.gpu_facts import preferred_block
from kvgen.lower.schedule import Params, Value
from kvgen.spec import KernelSpec, Workload

SHORT = 4096
"""Visible tokens of a short sequence: what surrounds the loop takes as long as the loop."""
IN_FLIGHT = 128
"""Tokens in flight per warp that suit warps which share a multiprocessor or a cluster."""

LARGE_GROUP = 64
"""Elements of a group of K that cost few instructions beside the codes."""


def plain_launches(spec: KernelSpec) -> Iterator[Params]:
    """Launches that are many times slower than the best at no shape, the best first. V per channel is scaled once per KV tile, so longer
    ones come first; K per token in several groups has many scales per KV tile, so short ones do.
    """
    short = ((64, 1), (32, 2)) if spec.value.per_channel else ((32, 2), (64, 1))
    groups = spec.key.quantized and not spec.key.per_channel and spec.key.group < spec.attention.head_dim
    for warps in (8, 4, 2):
        for kv_tile, tiles in (*(short if groups else ()), (128, 1), *short, (64, 2), (32, 4), (128, 2), (64, 4), (32, 1)):
            launch = {"warps": warps, "kv_tile": kv_tile, "tiles_in_flight": tiles, "ctas_per_sm": 1}
            yield Params(launch, copy="cp_async", reduction="last_cta", exact_q=True)


def workload_launches(spec: KernelSpec, work: Workload, target: Target) -> Iterator[Params]:
    """Launches for a workload, the best first. None for GPUs without clusters, where no default was measured."""
    if not GPUS[target].clusters:
        return
    changes, visible = _changes(spec, work, target), _visible(spec, work)
    launches = list(plain_launches(spec))
    if changes:
        launches.sort(key=lambda plain: (-plain.integer("warps"), plain.integer("kv_tile") * plain.integer("tiles_in_flight") != IN_FLIGHT))
    for exact_q in (False, True) if _hides_error(spec) else (True,):
        for plain in launches:
            launch = Params({**plain, **changes, "exact_q": exact_q})
            if launch.integer("warps") * launch.integer("kv_tile") <= visible:  # every warp has a KV tile
                yield launch


def _hides_error(spec: KernelSpec) -> bool:
    """Whether the default leaves out the rounding error of the query: beside the error of K's codes, where it would cost a tenth and more.
    Over a 2-bit V per token single rows have the same limit either way (docs/numerics.md).
    """
    if spec.key.bits > 4:
        return False
    coarse = spec.value.bits == 2 and not spec.value.per_channel and spec.key.group >= LARGE_GROUP
    return coarse or q_tiles(spec) > 1


def _changes(spec: KernelSpec, work: Workload, target: Target) -> dict[str, Value]:
    """What a launch for a workload has instead of the plain one's values, by the number of heads of all sequences."""
    sms, bits = GPUS[target].sms, spec.key.bits + spec.value.bits
    kv_heads, visible = work.batch * spec.attention.kv_heads, _visible(spec, work)
    heads = kv_heads * runs(spec)
    large_groups = spec.key.group >= LARGE_GROUP and spec.value.group == spec.attention.head_dim
    if 16 * heads <= sms and visible <= SHORT:
        return {"reduction": "cluster8"}
    if 64 * heads <= sms:  # a KV tile of 128 tokens would be most warps' only one
        return {"reduction": "cluster8", "kv_tile": 32, "tiles_in_flight": 2}
    if heads <= GPUS[target].resident(4) and visible <= SHORT:
        return {"reduction": "cluster4", "kv_tile": 32, "tiles_in_flight": 2}
    if 2 * heads <= sms < 4 * heads:
        return {"reduction": "cluster2", **({"warps": 12} if bits <= 4 and large_groups else {})}  # small groups spill at 12 warps
    if kv_heads > sms and (spec.key.bits <= 4 or (q_tiles(spec) == 1 and visible <= SHORT)):
        narrow = spec.attention.head_dim * bits <= 512 and visible >= SHORT and large_groups
        return {"ctas_per_sm": 2, "warps": 6 if narrow else 4}
    return {}


def _visible(spec: KernelSpec, work: Workload) -> int:
    """Tokens that a query sees; of a window, whole blocks."""
    window = spec.attention.window
    return work.kv_len if window is None else min(work.kv_len, window + preferred_block(spec))
