"""Combinations that no machine could run, or that contradict themselves, each with its reason and the field to change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgen.spec.model import AttentionSpec, CacheSpec, KeySpec, QuantSpec, ValueSpec, Workload

Place = tuple[str | int, ...]
Problem = tuple[Place, str]

TOKEN_STEP = 16
"""Tokens that every back end handles together: groups and pages are multiples of it."""


def attention_problems(attention: AttentionSpec) -> Iterator[Problem]:
    """Rules within `attention`."""
    if attention.q_heads % attention.kv_heads:
        yield ("q_heads",), f"q_heads ({attention.q_heads}) must be a multiple of kv_heads ({attention.kv_heads})"
    if attention.softcap and not 1e-20 <= attention.softcap <= 1e20:
        yield ("softcap",), f"softcap ({attention.softcap:g}) must be 0 or lie in 1e-20..1e20: scores divided by it must fit in float32"


def key_problems(key: KeySpec) -> Iterator[Problem]:
    """Rules within `key`."""
    if key.boost.fraction == 0:
        return
    if key.bits != 2:
        yield ("boost", "fraction"), f"boost raises channels of a 2-bit K to 4 bits, but key.bits is {key.bits}"
    if key.axis != "channel":
        yield ("boost", "fraction"), "boost picks channels, so key.axis must be channel"
    if not key.zero:
        yield ("boost", "fraction"), "boosted channels are asymmetric, so key.zero must be true"
    if key.boost.fraction == 1:
        yield ("boost", "fraction"), "a fraction of 1 boosts every channel: write bits: 4 instead"


def cache_problems(cache: CacheSpec) -> Iterator[Problem]:
    """Rules within `cache`."""
    if cache.layout == "paged" and cache.page is None:
        yield ("page",), "a paged cache needs `page`, the tokens per page"
    if cache.layout == "contiguous" and cache.page is not None:
        yield ("page",), f"page ({cache.page}) is given, but the layout is contiguous"
    if cache.page is not None and cache.page % TOKEN_STEP:
        yield ("page",), f"page ({cache.page}) must be a multiple of {TOKEN_STEP} tokens"


def kernel_problems(
    attention: AttentionSpec | None = None,
    key: KeySpec | None = None,
    value: ValueSpec | None = None,
    cache: CacheSpec | None = None,
    workloads: Sequence[Workload | None] = (),
) -> Iterator[Problem]:
    """Rules between sections; a section or workload that is None (because it has mistakes of its own) is passed over."""
    if key is not None:
        yield from _group_problems("key", key, attention, cache)
        yield from _boost_problems(key, attention)
    if value is not None:
        yield from _group_problems("value", value, attention, cache)
    if cache is not None:
        yield from _kept_problems(cache, attention, key, value)
    yield from _workload_problems(workloads, attention)


def _group_problems(label: str, quant: QuantSpec, attention: AttentionSpec | None, cache: CacheSpec | None) -> Iterator[Problem]:
    if not quant.quantized:
        return
    place: Place = (label, "group")
    if quant.axis == "token":
        if attention is not None and attention.head_dim % quant.group:
            dim = attention.head_dim
            yield place, f"{label}.group ({quant.group}) must divide head_dim ({dim}) when the axis is token"
        return
    if quant.group % TOKEN_STEP:
        yield place, f"{label}.group ({quant.group}) must be a multiple of {TOKEN_STEP} tokens when the axis is channel"
    if cache is not None and cache.page is not None and cache.page % quant.group:
        yield ("cache", "page"), f"page ({cache.page}) must be a multiple of {label}.group ({quant.group}): a page holds whole groups"


def _boost_problems(key: KeySpec, attention: AttentionSpec | None) -> Iterator[Problem]:
    if attention is None or key.boost.fraction == 0:
        return
    dim, fraction = attention.head_dim, key.boost.fraction
    if (fraction * dim) % 1:
        yield ("key", "boost", "fraction"), f"{fraction:g} of {dim} channels is {fraction * dim:g}, not a whole number"


def _kept_problems(cache: CacheSpec, attention: AttentionSpec | None, key: KeySpec | None, value: ValueSpec | None) -> Iterator[Problem]:
    window = attention.window if attention is not None else None
    if cache.local and value is not None and not value.quantized:
        yield ("cache", "local"), "local keeps recent V unquantized, but value.bits is 16: all of V is unquantized"
    if cache.sink and key is not None and value is not None and not (key.quantized or value.quantized):
        yield ("cache", "sink"), "sink keeps the first tokens unquantized, but nothing is quantized"
    if cache.sink and window is not None:
        yield ("cache", "sink"), f"sink keeps the first tokens, but attention.window ({window}) never looks back at them"
    if window is not None and cache.local > window:
        yield ("cache", "local"), f"local ({cache.local}) is more than attention.window ({window}): older tokens are never read"


def _workload_problems(workloads: Sequence[Workload | None], attention: AttentionSpec | None) -> Iterator[Problem]:
    seen: dict[str, int] = {}
    for index, work in enumerate(workloads):
        if work is None:
            continue
        place: Place = ("workloads", index, "q_len")
        if attention is not None and work.q_len > attention.q_len:
            yield place, f"q_len ({work.q_len}) is more than attention.q_len ({attention.q_len})"
        if work.q_len > work.kv_len:
            yield place, f"q_len ({work.q_len}) is more than kv_len ({work.kv_len}), which counts the new tokens"
        if work.key in seen:
            yield ("workloads", index), f"{work.key} is listed twice, first as workloads[{seen[work.key]}]"
        seen.setdefault(work.key, index)
