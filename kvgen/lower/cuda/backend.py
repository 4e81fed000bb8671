"""The back end: refusals, search space, default schedules, source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache

from kvgen.arch import GPUS, KB, Target
from kvgen.format.codecs import codec_of
from kvgen.format.constants import codec_headers, constants_of
from kvgen.format.layout import BOOST_CHANNELS, PackedLayout, packed_layout, rotation_of
from kvgen.format.sizes import smallest_block
from kvgen.lower.backend import FUNCTIONS, Lowering, Source
from kvgen.lower.cuda.shared import PLANNED, SharedMemory, cluster_size, q_tiles, rows_of_cta, runs, shared_memory
from kvgen.lower.gpu import gpu_facts, gpu_refusals, pack_memory, plain_schedule, preferred_block, refused, staged_memory, tiling_of
from kvgen.lower.modifier import modifier_of
from kvgen.lower.schedule import Params, Schedule, Value, layout_of
from kvgen.lower.space import Fact, SearchSpace
from kvgen.spec import AnyWorkload, KernelSpec, Workload
from kvgen.spec.dispatch import Tiling
from kvgen.spec.workloads import mean_length

NAME = "cuda"
REMEMBERED = 16
"""Specs whose search space and defaults are kept, since the default of every workload asks for them."""
MOST_RING = 168 * KB
"""Rings of a multiprocessor that a search tries, at most: more gained nothing on an H200."""
BOOST_STEP = 16
"""Channels of a step of matrix instructions."""
WHOLE_PAGE = 32
"""Tokens that the kernel takes at once; of smaller pages, two."""
NARROW_HEADS = 256
"""Channels per head, at most, of which a warp keeps tokens of the residual in registers (`mainloop/wide.cuh`)."""
MOST_GROUP = 512
"""Tokens that share params per channel, at most."""
IN_FLIGHT = 128
"""Tokens in flight per warp that suit warps which share a multiprocessor or a cluster."""
SHORT_TILES: dict[str, Value] = {"kv_tile": 32, "tiles_in_flight": 2}
"""KV tiles that suit a CTA of few tokens, since more of its warps have work."""


class CudaBackend(Lowering[KernelSpec]):
    """Kernels of mma.sync, cp.async and (SM90) bulk copies."""

    name = NAME
    targets: tuple[Target, ...] = tuple(GPUS)

    def unsupported(self, spec: KernelSpec, target: Target) -> str | None:
        return refused(_refusals(spec), spec, target) or _rotated_beyond(spec, target)

    def space(self, spec: KernelSpec, target: Target) -> SearchSpace:
        """`search_spaces/cuda.yaml` for a spec and a target. Raises UnsupportedError."""
        self.require(spec, target)
        return _space(spec, target)

    def defaults(self, spec: KernelSpec, target: Target) -> tuple[Schedule, ...]:
        """See `Lowering`; one for GPUs without clusters, where no other was measured."""
        self.require(spec, target)
        return _defaults(spec, target)

    def default(self, spec: KernelSpec, target: Target, work: AnyWorkload | None = None) -> Schedule:
        space, asked = self.space(spec, target), work if isinstance(work, Workload) else spec.workloads[0]
        plain, *further = self.defaults(spec, target)
        allowed = [plain, *(schedule for schedule in further if not space.doubts(schedule, asked))]
        equal = asked.shortest == asked.kv_len or asked.batch == 1
        return min(allowed, key=lambda one: self.tiling(spec, one, target).us(asked.batch, mean_length(asked), equal=equal))

    def lower(self, spec: KernelSpec, schedule: Schedule, target: Target) -> Source:
        """Source of one variant. Raises UnsupportedError where spec or schedule cannot be built."""
        self.require_schedule(spec, schedule, target)
        return source(spec, layout_of(spec, schedule.layout), schedule.launch, target)

    def tiling(self, spec: KernelSpec, schedule: Schedule, target: Target) -> Tiling:
        """See `Lowering`. The splits of a launch with clusters run at once."""
        cluster = cluster_size(schedule.launch.text("reduction"))
        return tiling_of(spec, schedule, target, runs=runs(spec), cluster=cluster, one_wave=cluster > 1)


def source(spec: KernelSpec, layout: PackedLayout, launch: Params, target: Target) -> Source:
    """The module of one variant. The spec's name, arch and workloads leave no trace, so that equal variants are one."""
    return Source.of_template(
        "cuda/module.cu.jinja",
        target,
        FUNCTIONS,
        codecs=codec_headers(layout),
        constants=constants_of(spec, layout),
        attention=spec.attention,
        arrival=spec.cache.arrival,
        q_tiles=q_tiles(spec),
        launch=launch,
        pack_memory=pack_memory(layout),
        reduction=launch.text("reduction").rstrip("0123456789"),
        cluster=cluster_size(launch.text("reduction")),
        static_memory=shared_memory(spec, layout, launch),
        planned_memory=shared_memory(spec, layout, Params({**launch, **PLANNED})),
        overlap=GPUS[target].dependent_launch,
        mask=f"SlidingWindow<{spec.attention.window}>" if spec.attention.window else "CausalMask",
        modifier=modifier_of(spec.attention),
        wide=spec.attention.head_dim > NARROW_HEADS,
        sinks="LearnedSinks" if spec.attention.sinks else "NoSinks",
    )


@lru_cache(maxsize=REMEMBERED)
def _space(spec: KernelSpec, target: Target) -> SearchSpace:
    usual, key = packed_layout(spec, preferred_block(spec), "mma"), spec.key

    @cache
    def memory(block: int, warps: int, kv_tile: int, tiles_in_flight: int, copy: str, reduction: str = "last_cta") -> SharedMemory:
        layout = replace(usual, tokens=block)  # asked for blocks that cannot be, too
        launch = Params(warps=warps, kv_tile=kv_tile, tiles_in_flight=tiles_in_flight, copy=copy, reduction=reduction)
        return shared_memory(spec, layout, launch)

    def busy_warps(block: int) -> int:
        """Warps of a multiprocessor that fill its issue slots, as far as their rings fit."""
        shapes = ((warps, memory(block, warps, 32, 2, "cp_async")) for warps in (8, 4))
        return next((warps for warps, one in shapes if one.total <= GPUS[target].shared_per_cta and one.ring <= MOST_RING), 0)

    few_rows = key.per_channel and key.group % 64 == 0 and not key.boost.fraction and rows_of_cta(spec) <= 4
    facts: dict[str, Fact] = {
        **gpu_facts(spec, target),
        "boosted": key.boost.fraction > 0,
        "cta_rows": rows_of_cta(spec),
        # K's codes meet the query as integers without `exact_q`, in KV tiles of more than 32 tokens (traits.cuh)
        "integer_keys": few_rows and codec_of(key).byte_operands,
        "coarse_values": coarse_values(spec),
        "runs": runs(spec),
        "resident": lambda reduction: GPUS[target].resident(cluster_size(reduction)),
        "most_ring": MOST_RING,
        "busy_warps": busy_warps,
        "shared_bytes": lambda *point: memory(*point).total,
        "ring_bytes": lambda *point: memory(*point).ring,
    }
    return SearchSpace.load(NAME, facts, spec.workloads)


# --- default schedules: a plain one for every call, and three for few heads and for many ---------------------------------


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


def plain_launches(spec: KernelSpec) -> Iterator[Params]:
    """Launches that are many times slower than the best at no shape, the best first."""
    for exact_q in (False, True) if coarse_values(spec) else (True,):
        for shape in _shapes(spec):
            yield Params(shape, exact_q=exact_q)


def further_launches(spec: KernelSpec) -> Iterator[list[Params]]:
    """For one very short or very long sequence (clusters of 8), for few heads (clusters of 2) and for many (two CTAs on a
    multiprocessor, where the plain launch has eight warps), the launches that suit them, the best first.
    """
    tiles = {} if codec_of(spec.key).coarse and codec_of(spec.value).coarse else SHORT_TILES  # of 2-bit codes short ones hold few bytes
    yield _changed(spec, {"reduction": "cluster8", **SHORT_TILES})
    yield _changed(spec, {"reduction": "cluster2", **tiles})
    if not _twelve_warps(spec):
        yield _changed(spec, {"ctas_per_sm": 2, "warps": 6 if spec.key.boost.fraction > 0 else 4, **tiles})


def coarse_values(spec: KernelSpec) -> bool:
    """Whether V has 2 bits per token: the error of its codes is hundreds of times as large as what `exact_q` leaves out."""
    return codec_of(spec.value).coarse and not spec.value.per_channel


def _twelve_warps(spec: KernelSpec) -> bool:
    """Whether K takes so many instructions (floats of 4 bits) that a third warp of each scheduler pays, and registers allow it."""
    key = codec_of(spec.key)
    return key.rows_of_byte > 1 and not key.integers and q_tiles(spec) == 1 and spec.attention.head_dim <= 128


def _shapes(spec: KernelSpec) -> Iterator[Params]:
    """Plain launches without `exact_q`, the best first. V per channel is scaled once per KV tile, so longer ones come first; K per token in
    several groups has many scales per KV tile, so short ones do.
    """
    short = ((64, 1), (32, 2)) if spec.value.per_channel else ((32, 2), (64, 1))
    groups = spec.key.quantized and not spec.key.per_channel and spec.key.group < spec.attention.head_dim
    for warps in (*((12,) if _twelve_warps(spec) else ()), 8, 4, 2):
        for kv_tile, tiles in (*(short if groups else ()), (128, 1), *short, (64, 2), (32, 4), (128, 2), (64, 4), (32, 1)):
            launch = {"warps": warps, "kv_tile": kv_tile, "tiles_in_flight": tiles, "ctas_per_sm": 1}
            yield Params(launch, copy="cp_async", reduction="last_cta")


def _changed(spec: KernelSpec, changes: dict[str, Value]) -> list[Params]:
    """Plain launches with other values in some parameters, the best first.

    Rounding errors are left out (`exact_q`) where the error of the codes hides them: that of the query over a K of 4 bits or 2 where it
    would cost a tenth and more, and those of query and weights over coarse values.
    """
    hidden = coarse_values(spec) or (codec_of(spec.key).byte_operands and q_tiles(spec) > 1)
    shapes = sorted(
        _shapes(spec), key=lambda one: (-one.integer("warps"), one.integer("kv_tile") * one.integer("tiles_in_flight") != IN_FLIGHT)
    )
    exactness = (False, True) if hidden else (True,)
    return list(dict.fromkeys(Params({**shape, **changes, "exact_q": exact_q}) for exact_q in exactness for shape in shapes))


def _rotated_beyond(spec: KernelSpec, target: Target) -> str | None:
    """Why the kernel that packs a prompt has no room for the rotated tokens of a block, or None."""
    layout, room = packed_layout(spec, smallest_block(spec), "mma"), GPUS[target].shared_per_cta
    if staged_memory(layout) + pack_memory(layout) <= room:
        return None
    return f"{layout.tokens} rotated tokens of head_dim {layout.head_dim}, which whole groups need, exceed {room} bytes of shared memory"


# --- refusals ----------------------------------------------------------------------------------------------------------


def _refusals(spec: KernelSpec) -> Iterator[str]:
    """What is not built, and why."""
    key, value, page, boost = spec.key, spec.value, spec.cache.page, spec.key.boost.fraction
    if key.boosted(spec.attention.head_dim) % BOOST_STEP:
        share = f"key.boost.fraction ({boost:g} of {spec.attention.head_dim} channels)"
        yield f"{share} is no multiple of {BOOST_STEP} channels, which matrix instructions take at once"
    if boost > 0 and spec.attention.head_dim > BOOST_CHANNELS:
        yield f"boosted channels (key.boost) are numbered up to {BOOST_CHANNELS}, and head_dim is {spec.attention.head_dim}"
    if spec.attention.head_dim > NARROW_HEADS and any(rotation_of(quant, spec.attention.head_dim) for quant in (key, value)):
        yield f"rotated tokens of more than {NARROW_HEADS} channels (attention.head_dim is {spec.attention.head_dim}) exceed registers"
    for name, quant in (("key", key), ("value", value)):
        if quant.static and codec_of(quant).coarse:
            yield f"{name}.scale ({quant.scale}) for {codec_of(quant).label}, whose codes need a scale for few numbers"
    together = f"is no multiple of {WHOLE_PAGE} tokens, whose codes share words in a 2-bit K"
    if boost > 0 and key.group % WHOLE_PAGE:
        yield f"key.boost with a key.group ({key.group}) that {together}, is not built"
    yield from gpu_refusals(spec)
    if page is not None and page % WHOLE_PAGE and codec_of(key).row_tile == WHOLE_PAGE:
        yield f"cache.page ({page}) {together}"
    if page is not None and page % WHOLE_PAGE and (key.per_channel or value.per_channel):
        yield f"cache.page ({page}) is no multiple of {WHOLE_PAGE} tokens, and blocks of 16 hold no params per channel"
    if any(op.per_channel and op.group > MOST_GROUP for op in (key, value)):
        kept = f"groups per channel have at most {MOST_GROUP} tokens, which stay unquantized until a block holds whole groups"
        yield f"{kept}: key.group is {key.group}, value.group {value.group}"
