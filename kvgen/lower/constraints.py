"""The rules of the search spaces of every back end: constraints, without which a schedule cannot be lowered or run, and hints, which paid
where they were measured: those of GPUs on an H200. Devices of other targets are searched without them.

A rule reads parameters, facts and the workload as attributes of `p`. Units: tokens, bytes; `shared_bytes` and `ring_bytes` are of one CTA.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Rule:
    """What a schedule must (or, as a hint, should) satisfy, and the reason to report otherwise, which may name values in {braces}."""

    reason: str
    holds: Callable[[Any], bool]
    """Of an object with parameters, facts and the workload as attributes."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The attributes that `holds` reads."""
        return tuple(name for name in self.holds.__code__.co_names if not hasattr(builtins, name))


@dataclass(frozen=True)
class Rules:
    """Of one search space."""

    constraints: tuple[Rule, ...] = ()
    hints: tuple[Rule, ...] = ()
    measured: tuple[str, ...] = ("cpu", "sm80", "sm89", "sm90")
    """Targets on whose devices the hints were found, or hold by their nature."""


_KEY_GROUPS = Rule(
    "a block of {block} tokens does not hold whole K groups of {key_group_tokens}", lambda p: p.block % p.key_group_tokens == 0
)
_VALUE_GROUPS = Rule(
    "a block of {block} tokens does not hold whole V groups of {value_group_tokens}", lambda p: p.block % p.value_group_tokens == 0
)
_PAGES = Rule("a page of {page} tokens does not hold whole blocks of {block}", lambda p: p.page == 0 or p.page % p.block == 0)
_PACKING = Rule(
    "the scales of a block ({block} tokens) exceed the shared memory of a packing kernel ({most_pack} bytes)",
    lambda p: p.pack_bytes(p.block) <= p.most_pack,
)
_MAX_BATCH = Rule("a launch takes at most {max_batch} sequences", lambda p: p.batch <= p.max_batch)

_CUDA = Rules(
    measured=("sm90",),
    constraints=(
        _KEY_GROUPS,
        _VALUE_GROUPS,
        _PAGES,
        Rule("a block of {block} tokens has neither 16 nor whole sub-tiles of 32", lambda p: p.block == 16 or p.block % 32 == 0),
        Rule("words of a 2-bit K hold codes of 32 tokens, so a block has more than {block}", lambda p: p.block > 16 or p.key_bits != 2),
        Rule(
            "a KV tile ({kv_tile} tokens) must divide a block ({block}), or be gathered from pages without params per channel",
            lambda p: (
                p.block % p.kv_tile == 0
                or (p.page > 0 and p.key_group_tokens == 1 and (p.value_group_tokens == 1) and (p.kv_tile % p.block == 0))
            ),
        ),
        Rule(
            "a KV tile of {kv_tile} tokens does not lie within one K group of {key_group_tokens}, and it has one index of boosted channels",
            lambda p: not p.boosted or p.key_group_tokens % p.kv_tile == 0,
        ),
        _PACKING,
        Rule(
            "the rotated tokens of a block of {block} exceed the shared memory of a CTA ({shared_per_cta} bytes)",
            lambda p: p.pack_bytes(p.block) + p.staged_bytes(p.block) <= p.shared_per_cta,
        ),
        Rule(
            "a warp looks up the pages of {tiles_in_flight} + 1 KV tiles at once, 32 at most",
            lambda p: p.page == 0 or (p.tiles_in_flight + 1) * max(1, p.kv_tile // p.block) <= 32,
        ),
        Rule(
            "rings and merge area exceed the shared memory of a CTA ({shared_per_cta} bytes)",
            lambda p: p.shared_bytes(p.block, p.warps, p.kv_tile, p.tiles_in_flight, p.copy, p.reduction) <= p.shared_per_cta,
        ),
        Rule(
            "{ctas_per_sm} CTAs exceed the shared memory of a multiprocessor ({shared_per_sm} bytes)",
            lambda p: (
                p.ctas_per_sm * (p.shared_bytes(p.block, p.warps, p.kv_tile, p.tiles_in_flight, p.copy, p.reduction) + p.cta_reserved)
                <= p.shared_per_sm
            ),
        ),
        Rule("{target} has no bulk copies", lambda p: p.copy == "cp_async" or p.bulk_copies),
        Rule("{target} has no clusters", lambda p: p.reduction == "last_cta" or p.clusters),
        Rule(
            "the rounding error of q is not far below the error of a K of 8 bits, so it must be carried",
            lambda p: p.exact_q or p.key_bits != 8 or not p.key_per_channel or p.cta_rows <= 4,
        ),
        _MAX_BATCH,
    ),
    hints=(
        Rule(
            "blocks of 16 tokens, of which two are gathered for a sub-tile, are for pages that hold no blocks of 32",
            lambda p: p.block > 16 or p.page % 32 != 0,
        ),
        Rule("blocks of {block} tokens are for groups that no shorter block holds", lambda p: p.block <= max(256, p.smallest_block)),
        Rule(
            "clusters of all {batch} x {kv_heads} heads do not fit the {processors} multiprocessors at once",
            lambda p: p.reduction == "last_cta" or p.batch * p.kv_heads * p.runs <= p.resident(p.reduction),
        ),
        Rule(
            "{tiles_in_flight} KV tiles of {kv_tile} tokens in flight: 32 tokens do not overlap, more than 256 gain nothing",
            lambda p: (64 if p.head_dim <= 256 else 32) <= p.kv_tile * p.tiles_in_flight <= 256,
        ),
        Rule(
            "more than {most_ring} bytes of rings on a multiprocessor gained nothing",
            lambda p: p.ctas_per_sm * p.ring_bytes(p.block, p.warps, p.kv_tile, p.tiles_in_flight, p.copy) <= p.most_ring,
        ),
        Rule(
            "rings hold fewer bytes than memory latency needs under way ({in_flight})",
            lambda p: p.ctas_per_sm * p.ring_bytes(p.block, p.warps, p.kv_tile, p.tiles_in_flight, p.copy) >= p.in_flight,
        ),
        Rule("{warps} x {ctas_per_sm} warps leave fewer than 128 registers for each thread", lambda p: p.warps * p.ctas_per_sm <= 16),
        Rule(
            "{warps} x {ctas_per_sm} warps leave issue slots idle, and the rings of more fit",
            lambda p: p.warps * p.ctas_per_sm >= p.busy_warps(p.block),
        ),
        Rule(
            "bulk copies gain little, and that with whole pages; one shape of CTA is enough to see it",
            lambda p: p.copy == "cp_async" or (p.warps == 8 and p.ctas_per_sm == 1 and p.reduction in ("last_cta", "cluster2", "cluster8")),
        ),
        Rule(
            "16 warps keep 128 registers for each thread, spill, and lost to 8 by a tenth and more where codes have 4 bits or 8",
            lambda p: p.warps * p.ctas_per_sm < 16 or p.key_bits + p.value_bits <= 4,
        ),
        Rule(
            "three CTAs per multiprocessor gained nothing but where codes have 2 bits",
            lambda p: p.ctas_per_sm != 3 or p.key_bits + p.value_bits <= 4,
        ),
        Rule(
            "four CTAs of 2 warps per multiprocessor are for more short heads than two CTAs hold at once",
            lambda p: p.ctas_per_sm < 4 or (p.warps == 2 and p.batch * p.kv_heads * p.runs > 2 * p.processors),
        ),
        Rule(
            "CTAs that share a multiprocessor and their clusters do not run at once",
            lambda p: p.ctas_per_sm == 1 or p.reduction == "last_cta",
        ),
        Rule("a KV tile of one stage is copied alike by bulk", lambda p: p.copy != "bulk_tile" or p.kv_tile > 32),
        Rule(
            "with {cta_rows} query rows of a CTA, leaving out the rounding error of q saves nothing, or nothing with KV tiles of {kv_tile} "
            "tokens",
            lambda p: p.exact_q or p.coarse_values or (p.key_per_channel and (p.cta_rows > 4 or (p.integer_keys and p.kv_tile == 128))),
        ),
        Rule(
            "over a 2-bit V per token, whose own error is hundreds of times as large as that of rounding, exact_q only costs time",
            lambda p: not p.exact_q or not p.coarse_values or (p.key_bits == 8 and p.key_per_channel and (p.cta_rows > 4)),
        ),
    ),
)

_TILELANG = Rules(
    measured=("sm90",),
    constraints=(
        _KEY_GROUPS,
        _PAGES,
        _PACKING,
        Rule("a KV tile ({kv_tile} tokens) must divide a block ({block})", lambda p: p.block % p.kv_tile == 0),
        Rule(
            "a KV tile of {kv_tile} tokens does not lie within one K group of {key_group_tokens}",
            lambda p: p.key_group_tokens == 1 or p.key_group_tokens % p.kv_tile == 0,
        ),
        _MAX_BATCH,
        Rule(
            "the ring exceeds the shared memory of a CTA ({shared_per_cta} bytes)",
            lambda p: p.ring_bytes(p.block, p.kv_tile, p.stages) <= p.shared_per_cta,
        ),
        Rule(
            "{ctas_per_sm} CTAs exceed the shared memory of a multiprocessor ({shared_per_sm} bytes)",
            lambda p: p.ctas_per_sm * (p.ring_bytes(p.block, p.kv_tile, p.stages) + p.cta_reserved) <= p.shared_per_sm,
        ),
    ),
    hints=(
        Rule("blocks of {block} tokens are for groups of 512", lambda p: p.block <= 256 or p.key_group_tokens == 512),
        Rule(
            "rings of a multiprocessor hold fewer bytes than copies keep in flight ({in_flight})",
            lambda p: p.ctas_per_sm * p.ring_bytes(p.block, p.kv_tile, p.stages) >= p.in_flight,
        ),
        Rule(
            "a KV tile of 32 tokens looks up a page, and reads K's channel params, twice as often as one of 64",
            lambda p: p.kv_tile > 32 or p.block == 32 or p.key_group_tokens == 32,
        ),
    ),
)

_CPU = Rules(
    constraints=(
        Rule("a block of {block} tokens is longer than {most_tokens}", lambda p: p.block <= p.most_tokens),
        Rule("a block of {block} tokens is neither one tile of 16 nor whole sub-tiles of 32", lambda p: p.block == 16 or p.block % 32 == 0),
        _PAGES,
        Rule("{key_tiles} tiles of 16 tokens are more than a chunk of {chunk}", lambda p: p.key_tiles * 16 <= p.chunk),
        Rule("{value_tiles} tiles of 16 channels are more than head_dim {head_dim}", lambda p: p.value_tiles * 16 <= p.head_dim),
        Rule("integers of 16 bits are too coarse for the error bound of float32", lambda p: p.dot == "fp32" or p.dtype != "float32"),
        Rule(
            "products of integers need K and V in codes that are integers, they have {key_codes} and {value_codes}",
            lambda p: p.dot == "fp32" or (p.key_integers and p.value_integers),
        ),
        Rule(
            "with V per channel, softmax weights as integers of 16 bits lose those of most tokens beside a token of large weight",
            lambda p: p.dot == "fp32" or p.value_bits == 16 or p.value_axis == "token",
        ),
        Rule(
            "K in groups of {key_group} channels fills no vector of 16 integers",
            lambda p: p.dot == "fp32" or p.key_bits == 16 or p.key_axis == "channel" or (p.key_group % 16 == 0),
        ),
        Rule(
            "V in groups of {value_group} channels fills no vector of 16 channels",
            lambda p: p.dot == "fp32" or p.value_bits == 16 or p.value_axis == "channel" or (p.value_group % 16 == 0),
        ),
        Rule(
            "exact sums over {head_dim} channels of {key_bits} bits exceed integers of 32 bits",
            lambda p: p.dot == "fp32" or p.key_bits == 16 or p.head_dim * 2**p.key_bits <= 131072,
        ),
    ),
    hints=(
        Rule(
            "blocks of {block} tokens were slower than shorter ones at every length",
            lambda p: p.block <= max(256, p.block_multiple),
        ),
        Rule(
            "blocks between two doublings of {block_multiple} tokens are not worth the time",
            lambda p: p.block // p.block_multiple & p.block // p.block_multiple - 1 == 0,
        ),
        Rule(
            "{rows} rows of {key_tiles} and {value_tiles} sums, with as many codes, exceed {registers} vector registers ({sum_registers} "
            "for 16 lanes)",
            lambda p: (
                p.rows * max(p.key_tiles, p.value_tiles) * p.sum_registers <= p.registers * 3 // 4 or max(p.key_tiles, p.value_tiles) == 1
            ),
        ),
        Rule(
            "{rows} rows of {key_tiles} sums are too few to hide the latency of a multiply-add",
            lambda p: p.rows * p.key_tiles * p.sum_registers >= 4,
        ),
        Rule(
            "{rows} rows of {value_tiles} sums are too few to hide the latency of a multiply-add",
            lambda p: p.rows * p.value_tiles * p.sum_registers >= 4 or p.value_tiles * 32 > p.head_dim,
        ),
        Rule(
            "{rows} rows at a time take as many passes over {gqa} heads x {q_len} tokens as fewer would",
            lambda p: p.rows == p.even_share(p.gqa * p.q_len, p.rows),
        ),
        Rule(
            "a split of {split_tokens} tokens covers all {kv_len}, as a smaller one would",
            lambda p: p.split_tokens <= max(p.kv_len, 1024) or p.batch * p.kv_heads >= p.enough_units,
        ),
        Rule(
            "{batch} sequences of {kv_heads} heads are enough work for all workers",
            lambda p: p.batch * p.kv_heads < p.enough_units or p.split_tokens == 4096,
        ),
    ),
)

_CUDA_MATRIX = Rules(
    measured=("sm90",),
    constraints=(
        Rule(
            "{channel_threads} x {row_threads} threads are fewer than 64 or more than 1024",
            lambda p: 64 <= p.channel_threads * p.row_threads <= 1024,
        ),
        Rule("{rows} rows of {vector} elements exceed the registers of a thread", lambda p: p.vector * p.rows <= 64),
    ),
    hints=(
        Rule(
            "rows of {channels} channels are no multiple of {vector}, and would be taken element by element",
            lambda p: p.channels % p.vector == 0,
        ),
        Rule(
            "{channel_threads} threads of {vector} channels are idle half of the time, because the matrix has {channels}",
            lambda p: p.channel_threads * p.vector < 2 * p.channels or p.channel_threads * p.vector <= 128,
        ),
        Rule(
            "eight warps of few registers fill a multiprocessor at any size; other CTAs than of 256 threads are not worth the time",
            lambda p: p.channel_threads * p.row_threads == 256,
        ),
        Rule(
            "a thread keeps {rows} x {vector} elements in flight: fewer than 16 bytes do not cover the latency of memory, over 128 cost "
            "warps",
            lambda p: 16 <= p.rows * p.vector * p.element_bytes <= 128,
        ),
        Rule(
            "a thread of {rows} rows loads its scales once, so shared memory saves nothing", lambda p: p.scales == "global" or p.rows == 1
        ),
        Rule("dequantize multiplies and divides nothing", lambda p: p.quotient == "divide" or p.operation == "quantize"),
        Rule("a reciprocal for one row costs as much as its division", lambda p: p.quotient == "divide" or p.rows > 1 or p.vector == 1),
        Rule("streaming pays only with whole 16-byte accesses", lambda p: p.cache == "default" or p.vector * p.element_bytes >= 16),
    ),
)

_CPU_MATRIX = Rules(
    hints=(
        Rule(
            "a tile of {channels_per_tile} channels is as one of fewer, because the matrix has {channels}",
            lambda p: p.channels_per_tile < 2 * p.channels or p.channels_per_tile == 128,
        ),
        Rule("a tile of {rows} rows is as one of fewer, because the matrix has {tokens}", lambda p: p.rows < 2 * p.tokens or p.rows == 1),
    ),
)

_CUDA_LINEAR = Rules(
    constraints=(
        Rule("{rows} rows are fewer than the {m} of the workload", lambda p: p.rows >= p.m),
        Rule("{warps_n} x {warps_k} warps are more than the 16 of a CTA", lambda p: p.warps_n * p.warps_k <= 16),
        Rule(
            "a CTA of {warps_n} warps of {tiles} tiles does not hold gate and up rows alike",
            lambda p: not p.gated or p.tiles * p.warps_n % 2 == 0,
        ),
        Rule("sums across CTAs need clusters, and {target} has none", lambda p: p.split == 1 or p.clusters),
        Rule("multicast needs clusters, and {target} has none", lambda p: not p.multicast or p.clusters),
        Rule("warp groups read x from their rings, which multicast does not fill", lambda p: not p.multicast or p.product == "mma"),
        Rule("multicast to {split} CTAs along k makes clusters of more than 8", lambda p: not p.multicast or p.split <= 4),
        Rule("{target} has no warp groups", lambda p: p.product == "mma" or p.clusters),
        Rule("{warps_n} warps are no warp groups of four", lambda p: p.product == "mma" or p.warps_n % 4 == 0),
        Rule("{stages} stages leave none to copy while two are multiplied", lambda p: p.product == "mma" or p.stages >= 3),
        Rule("wgmma multiplies 16, 32, 64 or 128 rows", lambda p: p.product == "mma" or p.rows >= 16),
        Rule(
            "{split} CTAs of {warps_k} warps along k have fewer than one stage each of {all_stages}",
            lambda p: p.split * p.warps_k <= p.all_stages,
        ),
        Rule(
            "sums of {tiles} tiles and {rows} rows exceed the registers of a thread",
            lambda p: p.registers(p.product, p.rows, p.tiles) <= 255,
        ),
        Rule(
            "rings of {stages} stages for {warps_k} groups of warps exceed the shared memory of a CTA ({shared_per_cta} bytes)",
            lambda p: p.shared_bytes(p.product, p.rows, p.tiles, p.warps_n, p.warps_k, p.stages, p.split, p.multicast) <= p.shared_per_cta,
        ),
        Rule(
            "{ctas} CTAs of {warps_n} x {warps_k} warps exceed the threads of a multiprocessor",
            lambda p: p.ctas * p.warps_n * p.warps_k <= 48,
        ),
    ),
    hints=(
        Rule("{rows} rows are twice as many as {m} need", lambda p: p.rows < 2 * p.m or p.rows == 8),
        Rule(
            "{ctas} CTAs of {warps_n} x {warps_k} warps leave a thread fewer registers than its sums need",
            lambda p: p.ctas * p.warps_n * p.warps_k * 32 * p.registers(p.product, p.rows, p.tiles) <= 65536,
        ),
        Rule(
            "shared memory holds fewer than {ctas} CTAs",
            lambda p: (
                p.ctas * (p.shared_bytes(p.product, p.rows, p.tiles, p.warps_n, p.warps_k, p.stages, p.split, p.multicast) + 1024)
                <= p.shared_per_sm
            ),
        ),
        Rule(
            "{tiles} tiles of {warps_n} warps and {split} CTAs along k leave half of {processors} multiprocessors idle",
            lambda p: p.n * p.split * 2 >= 16 * p.tiles * p.warps_n * p.processors or p.tiles * p.warps_n <= 2,
        ),
        Rule("{warps_n} x {warps_k} warps do not hide the latency of their copies", lambda p: p.ctas * p.warps_n * p.warps_k >= 4),
    ),
)

_CPU_LINEAR = Rules(
    constraints=(
        Rule("{rows} rows are fewer than the {m} of the workload", lambda p: p.rows >= p.m),
        Rule("a tile of the gate and one of up are multiplied at once", lambda p: not p.gated or p.tiles > 1),
        Rule("int16 would round float32", lambda p: p.dot == "fp32" or p.dtype != "float32"),
    ),
    hints=(
        Rule("AMX multiplies numbers of 16 bits", lambda p: p.dot == "int16" or p.amx_rows == 129),
        Rule("{m} rows are fewer than AMX is taken for", lambda p: p.amx_rows <= p.m or p.amx_rows == 129),
    ),
)

RULES = {
    "cuda": _CUDA,
    "tilelang": _TILELANG,
    "cpu": _CPU,
    "cuda-matrix": _CUDA_MATRIX,
    "cpu-matrix": _CPU_MATRIX,
    "cuda-linear": _CUDA_LINEAR,
    "cpu-linear": _CPU_LINEAR,
}
"""By the name of a file of `search_spaces`."""
