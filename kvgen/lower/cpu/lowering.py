"""Specs to C++ for the CPU."""

from __future__ import annotations

from typing import Any

from kvgen._machine import vector_bits, vector_registers
from kvgen.arch import Target
from kvgen.format.codecs import codec_of
from kvgen.format.constants import codec_headers, constants_of
from kvgen.format.layout import BOOST_CHANNELS
from kvgen.format.sizes import block_multiple, usual_block
from kvgen.lower.backend import CPU_FLAGS, FUNCTIONS, Lowering, Source
from kvgen.lower.modifier import modifier_of
from kvgen.lower.schedule import Params, Schedule, layout_of
from kvgen.lower.space import SearchSpace, spec_facts
from kvgen.spec import KernelSpec
from kvgen.spec.dispatch import Tiling

READ_BYTES_PER_US = 10_000
"""Nominal rate of a CPU's memory: only ratios of modelled times count."""
MOST_TOKENS = 2048
"""Of a block."""
WORKERS = 256
"""Workers of a plan. A constant, and not the number of threads, so that results do not depend on the machine."""
EXPANDED_FLOATS = 16384
"""Floats of K (and of V) that are expanded at once: 64 KiB, half of a second-level cache with V beside it."""


class CpuBackend(Lowering[KernelSpec]):
    """C++ over vectors of 16 lanes."""

    name = "cpu"
    targets: tuple[Target, ...] = ("cpu",)

    def unsupported(self, spec: KernelSpec, target: Target) -> str | None:
        if target not in self.targets:
            return f"it generates code for the CPU, not for {target}"
        if spec.key.boost.fraction > 0 and spec.attention.head_dim > BOOST_CHANNELS:
            return f"boosted channels (key.boost) are numbered up to {BOOST_CHANNELS}, and head_dim is {spec.attention.head_dim}"
        multiple, page = block_multiple(spec), spec.cache.page
        if multiple > MOST_TOKENS:
            return f"whole groups need blocks of {multiple} tokens, more than {MOST_TOKENS}"
        if page is not None and page % multiple:
            return f"a page of {page} tokens holds no whole block of {multiple} tokens: cache.page must be a multiple of that"
        return None

    def space(self, spec: KernelSpec, target: Target) -> SearchSpace:
        """The schedules of `search_spaces/cpu.yaml` that fit the spec."""
        self.require(spec, target)
        facts = {
            **spec_facts(spec),
            "block_multiple": block_multiple(spec),
            "most_tokens": MOST_TOKENS,
            "enough_units": WORKERS,
            "even_share": _even_share,
            "registers": vector_registers(),
            "sum_registers": _sum_registers(),
        }
        return SearchSpace.load("cpu", facts, spec.workloads)

    def defaults(self, spec: KernelSpec, target: Target) -> tuple[Schedule, ...]:
        """One: blocks near 128 tokens; up to 6 rows, and tiles that leave half of the registers to codes."""
        self.require(spec, target)
        sums = vector_registers() // _sum_registers()
        rows = _even_share(spec.attention.group, 6)  # also where their sums exceed the registers of SSE2: fewer decode each code more often
        key_tiles = next((tiles for tiles in (8, 4, 2) if rows * tiles <= sums // 2), 1)
        value_tiles = key_tiles
        while value_tiles * 16 > spec.attention.head_dim:
            value_tiles //= 2
        launch = Params(dot="fp32", rows=rows, key_tiles=key_tiles, value_tiles=value_tiles, chunk=128, split_tokens=4096, prefetch=8)
        return (Schedule(self.name, Params(block=usual_block(spec), order="simd"), launch),)

    def lower(self, spec: KernelSpec, schedule: Schedule, target: Target) -> Source:
        """C++ of the variant. Raises UnsupportedError."""
        self.require_schedule(spec, schedule, target)
        return Source.of_template("cpu/module.cpp.jinja", target, FUNCTIONS, CPU_FLAGS, **self._context(spec, schedule))

    def tiling(self, spec: KernelSpec, schedule: Schedule, target: Target) -> Tiling:
        """Threads take splits one after the other: the time follows the tokens of all heads, whatever the schedule."""
        del target
        layout, window = layout_of(spec, schedule.layout), spec.attention.window
        return Tiling(
            heads=spec.attention.kv_heads, resident=1, ctas_per_sm=1, step_tokens=layout.tokens, tile_bytes=layout.block_bytes,
            tile_us=layout.block_bytes / READ_BYTES_PER_US, most_waves=1, visible=window, most_splits=1,
        )  # fmt: skip

    def _context(self, spec: KernelSpec, schedule: Schedule) -> dict[str, Any]:
        attention, layout = spec.attention, layout_of(spec, schedule.layout)
        return {
            "format": f"{attention.dtype}, K {codec_of(spec.key).label}, V {codec_of(spec.value).label}",
            "codecs": codec_headers(layout),
            "constants": constants_of(spec, layout),
            "dtype": "k" + attention.dtype.capitalize(),
            "q_heads": attention.q_heads,
            "kv_heads": attention.kv_heads,
            "modifier": modifier_of(attention),
            "window": attention.window or 0,
            "sinks": attention.sinks,
            "arrival": spec.cache.arrival,
            "launch": dict(schedule.launch),
            "workers": WORKERS,
            "expanded": max(layout.subtile, EXPANDED_FLOATS // attention.head_dim // 32 * 32),
        }


def _sum_registers() -> int:
    """Registers that a vector of 16 floats takes."""
    return max(1, 512 // vector_bits())


def _even_share(rows: int, most: int) -> int:
    """The smallest block of rows that needs no more passes than blocks of `most` rows do."""
    passes = -(-rows // most)
    return -(-rows // passes)
