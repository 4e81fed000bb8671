"""The launches that serve where nothing was measured: a plain one for every call, and three for few heads and for many."""

from __future__ import annotations

from collections.abc import Iterator

from kvgen.lower.cuda.rows import q_tiles
from kvgen.lower.schedule import Params, Value
from kvgen.spec import KernelSpec

IN_FLIGHT = 128
"""Tokens in flight per warp that suit warps which share a multiprocessor or a cluster."""
SHORT_TILES: dict[str, Value] = {"kv_tile": 32, "tiles_in_flight": 2}
"""KV tiles that suit a CTA of few tokens, since more of its warps have work."""
COARSE_BITS = 4
"""Bits of K and V together at which short KV tiles cost more instructions than they save."""


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


def further_launches(spec: KernelSpec) -> Iterator[list[Params]]:
    """For one very short or very long sequence (clusters of 8), for few heads (clusters of 2) and for many (two CTAs on a
    multiprocessor), the launches that suit them, the best first.
    """
    few_bits = spec.key.bits + spec.value.bits <= COARSE_BITS
    yield _changed(spec, {"reduction": "cluster8", **SHORT_TILES})
    yield _changed(spec, {"reduction": "cluster2", **SHORT_TILES})
    warps = 6 if spec.key.boost.fraction > 0 else 4
    yield _changed(spec, {"ctas_per_sm": 2, "warps": warps, **({} if few_bits else SHORT_TILES)})


def _changed(spec: KernelSpec, changes: dict[str, Value]) -> list[Params]:
    """Plain launches with other values in some parameters, the best first."""
    shapes = sorted(
        _shapes(spec), key=lambda one: (-one.integer("warps"), one.integer("kv_tile") * one.integer("tiles_in_flight") != IN_FLIGHT)
    )
    launches = (Params({**shape, **changes, "exact_q": exact_q}) for exact_q in _exactness(spec) for shape in shapes)
    return list(dict.fromkeys(launches))


def _exactness(spec: KernelSpec) -> tuple[bool, ...]:
    """Values of `exact_q` of a default, the best first. Rounding errors are left out where the error of the codes hides them: that of the
    query over a K of at most 4 bits where it would cost a tenth and more, and those of query and weights over coarse values.
    """
    hidden = spec.key.bits <= 4 and q_tiles(spec) > 1
    return (False, True) if hidden or coarse_values(spec) else (True,)


def coarse_values(spec: KernelSpec) -> bool:
    """Whether V has 2 bits per token: the error of its codes is hundreds of times as large as what `exact_q` leaves out."""
    return spec.value.bits == 2 and not spec.value.per_channel
