"""Launches that are taken without measuring: for a workload, and plain ones, for all calls.

What suits a workload was measured on an H200, and for short heads on an H100; docs/decisions/0032-the-default-follows-the-workloads.md and
0041-short-heads-take-short-tiles.md have the figures, and 0043-defaults-for-the-whole-grid.md says which calls take them.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvgen.arch import GPUS, Target
from kvgen.lower.cuda.rows import q_tiles, runs
from kvgen.lower.gpu_facts import preferred_block
from kvgen.lower.schedule import Params, Value
from kvgen.spec import KernelSpec, Workload
from kvgen.spec.distance import mean_length

FEW_TOKENS = 4096 + 128
"""Visible tokens of a sequence, at most, at which what surrounds the loop takes as long as the loop. A window of 4096 tokens has so many
with the block in which it begins.
"""
IN_FLIGHT = 128
"""Tokens in flight per warp that suit warps which share a multiprocessor or a cluster."""

SHORT_TILES: dict[str, Value] = {"kv_tile": 32, "tiles_in_flight": 2}
"""KV tiles that suit a CTA of few tokens (`_short_heads`), since more of its warps have work."""

LARGE_GROUP = 64
"""Elements of a group of K that cost few instructions beside the codes."""


def plain_launches(spec: KernelSpec) -> Iterator[Params]:
    """Launches that are many times slower than the best at no shape, the best first."""
    for exact_q in (False, True) if coarse_values(spec) else (True,):
        for shape in _shapes(spec):
            yield Params(shape, exact_q=exact_q)


def _shapes(spec: KernelSpec) -> Iterator[Params]:
    """Plain launches without `exact_q`, the best first. V per channel is scaled once per KV tile, so longer ones come first; K per token in
    several groups has many scales per KV tile, so short ones do.
    """
    short = ((64, 1), (32, 2)) if spec.value.per_channel else ((32, 2), (64, 1))
    groups = spec.key.quantized and not spec.key.per_channel and spec.key.group < spec.attention.head_dim
    for warps in (8, 4, 2):
        for kv_tile, tiles in (*(short if groups else ()), (128, 1), *short, (64, 2), (32, 4), (128, 2), (64, 4), (32, 1)):
            launch = {"warps": warps, "kv_tile": kv_tile, "tiles_in_flight": tiles, "ctas_per_sm": 1}
            yield Params(launch, copy="cp_async", reduction="last_cta")


def workload_launches(spec: KernelSpec, work: Workload, target: Target) -> Iterator[Params]:
    """Launches for a workload, the best first. None for GPUs without clusters, where no default was measured."""
    if not GPUS[target].clusters:
        return
    visible, short = _visible(spec, work), _short_heads(spec, work, target)
    for changes in _changes(spec, work, target, short):
        shapes = list(_shapes(spec))
        if changes:
            shapes.sort(
                key=lambda shape: (-shape.integer("warps"), shape.integer("kv_tile") * shape.integer("tiles_in_flight") != IN_FLIGHT)
            )
        for exact_q in _exactness(spec):
            for shape in shapes:
                launch = Params({**shape, **changes, "exact_q": exact_q})
                if launch.integer("warps") * launch.integer("kv_tile") <= visible:  # every warp has a KV tile
                    yield launch


def _exactness(spec: KernelSpec) -> tuple[bool, ...]:
    """Values of `exact_q` of a default, the best first. Rounding errors are left out where the error of the codes hides them: that of the
    query over a K of at most 4 bits where it would cost a tenth and more, and those of query and weights over coarse values.
    """
    hidden = spec.key.bits <= 4 and q_tiles(spec) > 1
    return (False, True) if hidden or coarse_values(spec) else (True,)


def coarse_values(spec: KernelSpec) -> bool:
    """Whether V has 2 bits per token: the error of its codes is hundreds of times as large as what `exact_q` leaves out."""
    return spec.value.bits == 2 and not spec.value.per_channel


def _changes(spec: KernelSpec, work: Workload, target: Target, short: bool) -> Iterator[dict[str, Value]]:
    """What launches for a workload have instead of the plain one's values, the best first."""
    tiles: dict[str, Value] = SHORT_TILES if short else {}
    for changes in _ctas(spec, work, target, short):
        yield {**tiles, **changes}


def _ctas(spec: KernelSpec, work: Workload, target: Target, short: bool) -> Iterator[dict[str, Value]]:
    """CTAs per multiprocessor, their warps and the reduction, by the number of heads of all sequences; the best first."""
    sms, bits = GPUS[target].sms, spec.key.bits + spec.value.bits
    kv_heads, visible = work.batch * spec.attention.kv_heads, _visible(spec, work)
    heads = kv_heads * runs(spec)
    large_groups = spec.key.group >= LARGE_GROUP and spec.value.group == spec.attention.head_dim
    if 64 * heads <= sms or (16 * heads <= sms and visible <= FEW_TOKENS):
        yield {"reduction": "cluster8", **SHORT_TILES}
    elif heads <= GPUS[target].resident(4) and visible <= FEW_TOKENS:
        yield {"reduction": "cluster4"}
    elif 2 * heads <= sms < 4 * heads:
        more_warps = bits <= 4 and large_groups and not short  # small groups spill at 12 warps
        yield {"reduction": "cluster2", **({"warps": 12} if more_warps else {})}
    elif kv_heads > sms and short:
        if kv_heads > 2 * sms:
            yield {"ctas_per_sm": 4, "warps": 2}
        yield {"ctas_per_sm": 2, "warps": 4}
    elif kv_heads > sms and (spec.key.bits <= 4 or (q_tiles(spec) == 1 and visible <= FEW_TOKENS)):
        boosted = spec.key.boost.fraction > 0 and visible >= FEW_TOKENS and large_groups
        yield {"ctas_per_sm": 2, "warps": 6 if boosted else 4}
    else:
        yield {}


def _short_heads(spec: KernelSpec, work: Workload, target: Target) -> bool:
    """Whether a CTA of the plain schedule has so few tokens that a KV tile of 128 would be the only one of its eight warps."""
    sms, heads = GPUS[target].sms, work.batch * spec.attention.kv_heads * runs(spec)
    return _visible(spec, work) * min(heads, sms) <= 8 * 128 * sms


def _visible(spec: KernelSpec, work: Workload) -> int:
    """Tokens that a query sees, of unequal lengths in the mean; of a window, whole blocks."""
    window, tokens = spec.attention.window, round(mean_length(work))
    return tokens if window is None else min(tokens, window + preferred_block(spec))
