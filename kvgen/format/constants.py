"""The C++ struct `Constants`: all that kernels of any back end know of a packed cache. No header computes a size or an offset."""

from __future__ import annotations

from collections.abc import Iterator

from kvgen.format.layout import Operand, PackedLayout, Which, full_runs
from kvgen.format.residual import ResidualRows, residual_rows, window_places
from kvgen.spec import KernelSpec

ELEMENTS = {"float16": "kvgen::Half", "bfloat16": "kvgen::Bfloat", "float32": "float"}
"""Types in C++ by dtype; every back end defines the two of 16 bits."""
_SELECTORS = {"mean_abs": "mean_abs", "range": "range", "static": "fixed"}
"""`static` is a word of C++."""


def codec_headers(layout: PackedLayout) -> list[str]:
    """The files of `codec/` that a source includes for `layout`, besides those that every source has."""
    return sorted({header for op in (layout.key, layout.value) if (header := op.codec.header) is not None})


def constants_of(spec: KernelSpec, layout: PackedLayout) -> str:
    """The struct for a spec whose packed blocks have `layout`."""
    rows, page_blocks = residual_rows(spec, layout.tokens), (spec.cache.page or 0) // layout.tokens
    places = window_places(spec, layout.tokens)
    return constants(layout, rows, spec.attention.dtype, page_blocks=page_blocks, window_places=places)


def constants(layout: PackedLayout, rows: ResidualRows, dtype: str, *, page_blocks: int = 0, window_places: int = 0) -> str:
    """The struct for blocks of `layout` in a cache of `dtype`. Offsets and sizes are in bytes.

    `rows`: the unquantized tokens. `page_blocks`: blocks of a page, 0 in a contiguous cache. `window_places`: as `window.window_places`.
    """
    boost = layout.key.boost
    select = _SELECTORS[boost.select] if boost else "fixed"
    lines = [
        "struct Constants {",
        f"  using Element = {ELEMENTS[dtype]};",
        f"  using Param = {'float' if layout.param_bytes == 4 else ELEMENTS['float16']};",
        f"  using ResidualRows = kvgen::ResidualRows<{rows.block}, {rows.sink}, {rows.local}, {rows.rollback}, {rows.capacity}>;",
        _numbers("  ", HeadDim=layout.head_dim, Tokens=layout.tokens, Subtile=layout.subtile, Subtiles=layout.subtiles),
        _numbers("  ", HeaderBytes=layout.header_bytes, SubtileBytes=layout.subtile_bytes, BlockBytes=layout.block_bytes),
        f"  static constexpr bool kPaged = {str(page_blocks > 0).lower()};",
        _numbers("  ", PageBlocks=page_blocks, WindowPlaces=window_places),
        _numbers("  ", Boosted=layout.key.boosted, BoostSlots=layout.boost_slots),
        _numbers("  ", BoostIndex=layout.channel_params_end, BoostCodes=layout.boost_codes_offset),
        f"  static constexpr kvgen::Select kSelect = kvgen::Select::{select};",
        *_operand(layout, "key"),
        *_operand(layout, "value"),
        "};",
    ]
    return "\n".join(lines)


def _operand(layout: PackedLayout, which: Which) -> Iterator[str]:
    op: Operand = layout.operand(which)
    yield f"  struct {which.capitalize()} {{"
    yield f"    using Codec = kvgen::{op.codec.type};"
    if op.rotation is not None:
        yield f"    using Rotation = kvgen::Hadamard<{op.rotation.block}, {str(op.rotation.signs).lower()}>;"
    if op.static:
        yield "    using StaticScale = void;"
    flags = {"PerChannel": op.per_channel, "PerToken": op.per_token, "Zero": op.zero, "RowsAreTokens": op.rows_are_tokens}
    yield "    static constexpr bool " + ", ".join(f"k{name} = {str(value).lower()}" for name, value in flags.items()) + ";"
    yield _numbers(
        "    ",
        Group=layout.tokens if op.static and not op.grouped else op.group,
        Params=op.params,
        Runs=full_runs(op, layout.head_dim),
        CodeChannels=layout.code_channels(which),
    )
    yield _numbers("    ", Codes=layout.codes_offset(which), CodesBytes=layout.codes_bytes(which))
    yield _numbers("    ", ChannelParams=layout.channel_params_offset(which), TokenParams=layout.token_params_offset(which))
    yield _numbers("    ", TokenParamsBytes=layout.token_params_bytes(which))
    yield "  };"


def _numbers(indent: str, **values: int) -> str:
    return f"{indent}static constexpr int " + ", ".join(f"k{name} = {value}" for name, value in values.items()) + ";"
