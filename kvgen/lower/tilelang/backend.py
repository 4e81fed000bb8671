"""The back end: search space, default schedule, source, and what it refuses beyond what both GPU back ends do."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import replace

from kvgen.arch import GPUS, Target
from kvgen.format.constants import constants_of
from kvgen.format.layout import packed_layout
from kvgen.lower.backend import FUNCTIONS, Lowering, Source
from kvgen.lower.gpu import gpu_facts, gpu_refusals, pack_memory, plain_schedule, preferred_block, refused, tiling_of
from kvgen.lower.schedule import Params, Schedule
from kvgen.lower.space import SearchSpace
from kvgen.lower.tilelang.isolate import Program, lower_apart, missing, tilelang_version
from kvgen.lower.tilelang.sizes import sizes_of
from kvgen.spec import KernelSpec, KeySpec, ValueSpec
from kvgen.spec.dispatch import Tiling

NAME = "tilelang"
CHANNEL_GROUPS = (32, 64, 128, 256, 512)
"""Tokens that share K's params per channel: a KV tile lies within a group."""
MAX_HEAD_DIM = 128
FLAGS, FOLDERS = ("-diag-suppress=550",), ("tilelang", "cuda", "common")
"""Of the compiler; of headers."""
LAUNCHES = ((128, 2, 8), (64, 2, 8), (64, 2, 4), (32, 2, 8), (64, 2, 2), (32, 2, 4), (32, 2, 2))
"""(kv_tile, stages, ctas_per_sm) by preference."""
RING_BYTES = 32 * 1024
"""A CTA's ring that is large enough: of wider codes, KV tiles have fewer tokens."""


class TileLangBackend(Lowering[KernelSpec]):
    """Flash decoding written in TileLang, a warp per CTA."""

    name = NAME
    targets: tuple[Target, ...] = tuple(GPUS)

    def missing(self) -> str | None:
        """Why TileLang cannot be used here, with the line that installs it; None if it can."""
        return missing()

    def unsupported(self, spec: KernelSpec, target: Target) -> str | None:
        """Why the spec cannot be lowered for the target, whatever is installed; None if it can."""
        return refused(_refusals(spec), spec, target)

    def space(self, spec: KernelSpec, target: Target) -> SearchSpace:
        """`search_spaces/tilelang.yaml` for a spec and a target. Raises UnsupportedError; needs no TileLang."""
        self.require(spec, target)

        def ring_bytes(block: int, kv_tile: int, stages: int) -> int:
            launch = Params(kv_tile=kv_tile, stages=stages, ctas_per_sm=1)
            return sizes_of(spec, Schedule(NAME, Params(block=block, order="mma"), launch)).shared_bytes

        return SearchSpace.load(NAME, {**gpu_facts(spec, target), "ring_bytes": ring_bytes}, spec.workloads)

    def defaults(self, spec: KernelSpec, target: Target) -> tuple[Schedule, ...]:
        """One: the longest KV tiles whose rings are not too large. Raises UnsupportedError."""
        codes = packed_layout(spec, preferred_block(spec), "mma").subtile_bytes
        wide = [launch for launch in LAUNCHES if launch[1] * launch[0] // 32 * codes <= RING_BYTES * 9 // 8]
        launches = [Params(kv_tile=tile, stages=stages, ctas_per_sm=ctas) for tile, stages, ctas in dict.fromkeys((*wide, *LAUNCHES))]
        return (plain_schedule(NAME, spec, target, self.space(spec, target), launches),)

    def lower(self, spec: KernelSpec, schedule: Schedule, target: Target) -> Source:
        """Source of one variant: TileLang's kernels with kvgen's own host side and headers.

        Raises UnsupportedError where spec or schedule cannot be built, ToolchainMissing without TileLang, CompileError where it fails.
        """
        self.require_schedule(spec, schedule, target)
        sizes, programs = sizes_of(spec, schedule), lower_apart(spec, schedule)

        def arguments(program: Program) -> str:
            """What the host hands to a program, by the names of its parameters."""
            names = ", ".join(f"t.{name}" for name in program.parameters)
            return textwrap.fill(names, 120, break_long_words=False, break_on_hyphens=False)

        return Source.of_template(
            "tilelang/module.cu.jinja",
            target,
            FUNCTIONS,
            FLAGS,
            FOLDERS,
            version=tilelang_version(),
            sizes=sizes,
            pack_memory=pack_memory(sizes.layout),
            static=programs.static,
            planned=programs.planned,
            arguments=arguments,
            constants=constants_of(spec, sizes.layout),
            overlap=GPUS[target].dependent_launch,
        )

    def tiling(self, spec: KernelSpec, schedule: Schedule, target: Target) -> Tiling:
        sizes = sizes_of(spec, schedule)
        found = tiling_of(spec, schedule, target, runs=sizes.runs)
        tile_us = found.tile_us * sizes.tile_bytes / found.tile_bytes
        return replace(found, tile_bytes=sizes.tile_bytes, tile_us=tile_us)


def _code_refusals(k: KeySpec, v: ValueSpec) -> Iterator[str]:
    """Codes that the program does not expand."""
    if k.boost.fraction > 0:
        yield f"key.boost ({k.boost.fraction:g} of channels in 4 bits): K is read as codes of one width"
    if not (k.quantized and v.quantized):
        yield f"key.bits ({k.bits}) and value.bits ({v.bits}) must be 8, 4 or 2: the program expands codes"
    if (k.type, v.type) != ("int", "int"):
        yield f"key.type ({k.type}) and value.type ({v.type}) must be int: the program expands integers"
    for name, op in (("key", k), ("value", v)):
        if op.rotate is not None and op.rotate.applied == "kernel":
            yield f"{name}.rotate: tokens are packed, and attended, as they are given"


def _refusals(spec: KernelSpec) -> Iterator[str]:
    """What the program does not compute."""
    a, k, v, c = spec.attention, spec.key, spec.value, spec.cache
    yield from _code_refusals(k, v)
    yield from gpu_refusals(spec)
    if a.head_dim % 32 != 0 or a.head_dim > MAX_HEAD_DIM:
        many = f"attention.head_dim ({a.head_dim}) is no multiple of 32 up to {MAX_HEAD_DIM}"
        yield f"{many}: a warp holds the output of whole query rows"
    if k.static or v.static:
        yield f"key.scale ({k.scale}) and value.scale ({v.scale}) must be dynamic: scales are read from the blocks"
    if any(op.axis == "token" and op.group != a.head_dim for op in (k, v)):
        yield f"key.group ({k.group}) and value.group ({v.group}) must be head_dim where the axis is token: a token has one scale"
    if v.per_channel:
        yield "value.axis is channel, and weights take one scale per token"
    if k.per_channel and k.group not in CHANNEL_GROUPS:
        yield f"where the axis is channel, key.group ({k.group}) must be one of {', '.join(map(str, CHANNEL_GROUPS))} tokens"
    if a.softcap:
        yield f"attention.softcap ({a.softcap:g}): scores are taken as they are"
    if a.window is not None:
        yield f"attention.window ({a.window}): all cached tokens are read"
    if a.sinks:
        yield "attention.sinks: the denominator has no logit of its own"
    if c.unpacked + c.rollback > 0 or c.arrival:
        kept = f"cache.sink ({c.sink}), cache.local ({c.local}) and cache.rollback ({c.rollback}) must be 0, cache.quantize block"
        yield f"{kept}: the residual is the block that fills"
    if c.page is not None and c.page % 32 != 0:
        yield f"cache.page ({c.page}) is no multiple of 32 tokens, which the kernel reads at once"
