"""Combinations that no machine could run, or that contradict themselves, each with its reason and the field to change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from kvgen.spec.model import AttentionSpec, CacheSpec, KernelSpec, KeySpec, QuantSpec

Place = tuple[str | int, ...]
Problem = tuple[Place, str]
S = TypeVar("S")

TOKEN_STEP = 16
"""Tokens that every back end handles together: groups and pages are multiples of it."""
WHOLE = 1e-9
"""A product of a fraction and channels that is as near as this to a whole number is meant to be one."""
SMALLEST_SOFTCAP = 0.001
"""Kernels divide by it in float32, where far smaller ones are 0."""


def attention_problems(attention: AttentionSpec) -> Iterator[Problem]:
    """Rules within `attention`."""
    return _told((_heads, _softcap), attention)


def key_problems(key: KeySpec) -> Iterator[Problem]:
    """Rules within `key`."""
    return _told((_boosted_bits, _boosted_axis, _boosted_zero, _boosted_all), key)


def cache_problems(cache: CacheSpec) -> Iterator[Problem]:
    """Rules within `cache`."""
    return _told((_paged, _contiguous, _page_step), cache)


def kernel_problems(spec: KernelSpec) -> Iterator[Problem]:
    """Rules between sections, and between workloads."""
    return _told((_key_group, _value_group, _boosted_channels, _local, _sink, _windowed_sink, _windowed_local, _workloads), spec)


def problems(spec: KernelSpec) -> Iterator[Problem]:
    """Every rule of a spec, of which some fields may be unknown: reading those raises AttributeError."""
    sections: tuple[tuple[str, Callable[[Any], Iterator[Problem]]], ...] = (
        ("attention", attention_problems),
        ("key", key_problems),
        ("cache", cache_problems),
    )
    for name, judge in sections:
        for place, reason in judge(getattr(spec, name, None)):
            yield (name, *place), reason
    yield from kernel_problems(spec)


def _told(rules: Iterable[Callable[[S], Iterator[Problem]]], section: S) -> Iterator[Problem]:
    """What the rules say. One that reads an unknown field says nothing."""
    for rule in rules:
        with suppress(AttributeError):
            yield from rule(section)


def _heads(attention: AttentionSpec) -> Iterator[Problem]:
    if attention.q_heads % attention.kv_heads:
        yield ("q_heads",), f"q_heads ({attention.q_heads}) must be a multiple of kv_heads ({attention.kv_heads})"


def _softcap(attention: AttentionSpec) -> Iterator[Problem]:
    if 0 < attention.softcap < SMALLEST_SOFTCAP:
        yield ("softcap",), f"softcap ({attention.softcap:g}) must be 0, which switches it off, or at least {SMALLEST_SOFTCAP}"


def _boosted_bits(key: KeySpec) -> Iterator[Problem]:
    if key.boost.fraction and key.bits != 2:
        yield ("boost", "fraction"), f"boost raises channels of a 2-bit K to 4 bits, but key.bits is {key.bits}"


def _boosted_axis(key: KeySpec) -> Iterator[Problem]:
    if key.boost.fraction and key.axis != "channel":
        yield ("boost", "fraction"), "boost picks channels, so key.axis must be channel"


def _boosted_zero(key: KeySpec) -> Iterator[Problem]:
    if key.boost.fraction and not key.zero:
        yield ("boost", "fraction"), "boosted channels are asymmetric, so key.zero must be true"


def _boosted_all(key: KeySpec) -> Iterator[Problem]:
    if key.boost.fraction == 1:
        yield ("boost", "fraction"), "a fraction of 1 boosts every channel: write bits: 4 instead"


def _paged(cache: CacheSpec) -> Iterator[Problem]:
    if cache.layout == "paged" and cache.page is None:
        yield ("page",), "a paged cache needs `page`, the tokens per page"


def _contiguous(cache: CacheSpec) -> Iterator[Problem]:
    if cache.layout == "contiguous" and cache.page is not None:
        yield ("page",), f"page ({cache.page}) is given, but the layout is contiguous"


def _page_step(cache: CacheSpec) -> Iterator[Problem]:
    if cache.page is not None and cache.page % TOKEN_STEP:
        yield ("page",), f"page ({cache.page}) must be a multiple of {TOKEN_STEP} tokens"


def _key_group(spec: KernelSpec) -> Iterator[Problem]:
    return _group("key", spec.key, spec)


def _value_group(spec: KernelSpec) -> Iterator[Problem]:
    return _group("value", spec.value, spec)


def _group(label: str, quant: QuantSpec, spec: KernelSpec) -> Iterator[Problem]:
    if not quant.quantized:
        return
    place: Place = (label, "group")
    if quant.axis == "token":
        dim = spec.attention.head_dim
        if dim % quant.group:
            yield place, f"{label}.group ({quant.group}) must divide head_dim ({dim}) when the axis is token"
        return
    if quant.group % TOKEN_STEP:
        yield place, f"{label}.group ({quant.group}) must be a multiple of {TOKEN_STEP} tokens when the axis is channel"
    page = spec.cache.page
    if page is not None and page % quant.group:
        yield ("cache", "page"), f"page ({page}) must be a multiple of {label}.group ({quant.group}): a page holds whole groups"


def _boosted_channels(spec: KernelSpec) -> Iterator[Problem]:
    dim, fraction = spec.attention.head_dim, spec.key.boost.fraction
    channels = fraction * dim  # 29 / 112 * 112 is a little less than 29
    whole = round(channels)
    if 0 < fraction < 1 and (abs(channels - whole) > WHOLE or not 0 < whole < dim):
        yield ("key", "boost", "fraction"), f"{fraction:g} of {dim} channels is {channels:g}, not a whole number"


def _local(spec: KernelSpec) -> Iterator[Problem]:
    if spec.cache.local and not (spec.key.quantized or spec.value.quantized):
        yield ("cache", "local"), "local keeps the newest tokens unquantized, but nothing is quantized"


def _sink(spec: KernelSpec) -> Iterator[Problem]:
    if spec.cache.sink and not (spec.key.quantized or spec.value.quantized):
        yield ("cache", "sink"), "sink keeps the first tokens unquantized, but nothing is quantized"


def _windowed_sink(spec: KernelSpec) -> Iterator[Problem]:
    window = spec.attention.window
    if spec.cache.sink and window is not None:
        yield ("cache", "sink"), f"sink keeps the first tokens, but attention.window ({window}) never looks back at them"


def _windowed_local(spec: KernelSpec) -> Iterator[Problem]:
    window, local = spec.attention.window, spec.cache.local
    if window is not None and local >= window:
        reason = "older tokens are never read, and their pages may be gone when they are packed"
        yield ("cache", "local"), f"local ({local}) is not less than attention.window ({window}): {reason}"


def _workloads(spec: KernelSpec) -> Iterator[Problem]:
    seen: dict[str, int] = {}
    for index, work in enumerate(spec.workloads):
        yield from _told((_queries_compiled, _queries_counted, _lengths_ordered), (spec, index))
        with suppress(AttributeError):
            if work.key in seen:
                yield ("workloads", index), f"{work.key} is listed twice, first as workloads[{seen[work.key]}]"
            seen.setdefault(work.key, index)


def _queries_compiled(listed: tuple[KernelSpec, int]) -> Iterator[Problem]:
    spec, index = listed
    q_len, most = spec.workloads[index].q_len, spec.attention.q_len
    if q_len > most:
        yield ("workloads", index, "q_len"), f"q_len ({q_len}) is more than attention.q_len ({most})"


def _queries_counted(listed: tuple[KernelSpec, int]) -> Iterator[Problem]:
    spec, index = listed
    work = spec.workloads[index]
    if work.q_len > work.kv_len:
        yield ("workloads", index, "q_len"), f"q_len ({work.q_len}) is more than kv_len ({work.kv_len}), which counts the new tokens"


def _lengths_ordered(listed: tuple[KernelSpec, int]) -> Iterator[Problem]:
    spec, index = listed
    work, place = spec.workloads[index], ("workloads", index, "lengths")
    shortest, longest = work.lengths.min, work.lengths.max
    if longest is not None and longest != work.kv_len:
        yield (*place, "max"), f"max ({longest}) is not kv_len ({work.kv_len}), which is the longest: leave max out"
    if work.lengths.distribution == "equal":
        if shortest is not None:
            yield (*place, "min"), f"equal lengths have no min ({shortest}): write distribution: log_uniform"
    elif shortest is None:
        yield (*place, "min"), "required, but missing: the tokens of the shortest sequence"
    elif shortest >= work.kv_len:
        yield (*place, "min"), f"min ({shortest}) is not below kv_len ({work.kv_len}), the longest: write lengths: equal"
    elif work.batch == 1:
        yield place, "one sequence has one length: write lengths: equal"
    elif work.q_len > shortest:
        yield (*place, "min"), f"min ({shortest}) is less than q_len ({work.q_len}): lengths count the new tokens"
