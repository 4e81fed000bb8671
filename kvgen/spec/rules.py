"""Combinations that no machine could run, or that contradict themselves, each with its reason and the field to change.

They are judged once all fields of a section, or all sections of a spec, are right by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvgen.spec.model import AnyWorkload, AttentionSpec, CacheSpec, KernelSpec, KeySpec, LinearFormat, QuantSpec, Workload

Place = tuple[str | int, ...]
Problem = tuple[Place, str]

KIND = "rule"
"""Type of pydantic's errors for problems."""
TOKEN_STEP = 16
"""Tokens that every back end handles together: groups and pages are multiples of it."""
WHOLE = 1e-9
"""A product of a fraction and channels that is as near as this to a whole number is meant to be one."""
IMPLIED: dict[str, dict[str, Any]] = {
    "e4m3": {"bits": 8, "zero": False},
    "e5m2": {"bits": 8, "zero": False},
    "nvfp4": {"bits": 4, "zero": False, "axis": "token", "group": 16},
    "mxfp4": {"bits": 4, "zero": False, "axis": "token", "group": 32},
}
"""What a float type says about other fields of `key` and `value`, which may be left out."""
TWO_LEVELS = ("nvfp4",)
"""Types of which a static scale multiplies those of groups, which blocks hold."""
SMALLEST_SOFTCAP = 0.001
"""Kernels divide by it in float32, where far smaller ones are 0."""


def attention(spec: AttentionSpec) -> Iterator[Problem]:
    """Problems within `attention`."""
    if spec.q_heads % spec.kv_heads:
        yield ("q_heads",), f"q_heads ({spec.q_heads}) must be a multiple of kv_heads ({spec.kv_heads})"
    if 0 < spec.softcap < SMALLEST_SOFTCAP:
        yield ("softcap",), f"softcap ({spec.softcap:g}) must be 0, which switches it off, or at least {SMALLEST_SOFTCAP}"


def code_type(spec: QuantSpec) -> Iterator[Problem]:
    """Problems of `type` within `key` and `value`."""
    implied = IMPLIED.get(spec.type, {})
    for name, value in implied.items():
        if (given := getattr(spec, name)) != value:
            told, not_that = (str(one).lower() if isinstance(one, bool) else one for one in (value, given))
            yield (name,), f"{name} of type {spec.type} is {told}, not {not_that}: leave it out"
    if spec.scale != "dynamic" and spec.zero and not implied:
        yield ("zero",), f"a static scale ({spec.scale}) has no zero: leave zero out"
    if spec.type == "mxfp4" and spec.scale != "dynamic":
        yield ("scale",), f"mxfp4 has no second level of scales, so none is static ({spec.scale}): leave scale out"
    if spec.type in TWO_LEVELS and spec.scale == "channel":
        yield ("scale",), f"the second level of scales of {spec.type} is one number of a tensor or a head, not of a channel"
    if spec.scale != "dynamic" and not spec.quantized:
        yield ("scale",), f"a scale is for codes, and there are none with {spec.bits} bits"


def key(spec: KeySpec) -> Iterator[Problem]:
    """Problems within `key`."""
    place = ("boost", "fraction")
    if spec.boost.fraction and spec.bits != 2:
        yield place, f"boost raises channels of a 2-bit K to 4 bits, but key.bits is {spec.bits}"
    if spec.boost.fraction and spec.axis != "channel":
        yield place, "boost picks channels, so key.axis must be channel"
    if spec.boost.fraction and spec.zero is False:
        yield place, "boosted channels are asymmetric, so key.zero must be true"
    if spec.boost.fraction == 1:
        yield place, "a fraction of 1 boosts every channel: write bits: 4 instead"


def cache(spec: CacheSpec) -> Iterator[Problem]:
    """Problems within `cache`."""
    if spec.layout == "paged" and spec.page is None:
        yield ("page",), "a paged cache needs `page`, the tokens per page"
    if spec.layout == "contiguous" and spec.page:
        yield ("page",), f"page ({spec.page}) is given, but the layout is contiguous"
    if spec.page is not None and spec.page % TOKEN_STEP:
        yield ("page",), f"page ({spec.page}) must be a multiple of {TOKEN_STEP} tokens"
    for name in ("sink", "local", "rollback") if spec.arrival else ():
        if tokens := getattr(spec, name):
            why = "any number of tokens may be taken back" if name == "rollback" else "every token is quantized when it is written"
            yield (name,), f"{name} ({tokens}) must be 0 with cache.quantize arrival: {why}"


def linear(spec: LinearFormat) -> Iterator[Problem]:
    """Problems within `linear`."""
    if isinstance(spec.group, int) and spec.k % spec.group:
        yield ("k",), f"k ({spec.k}) must be a multiple of group ({spec.group})"
    if spec.epilogue == "silu_mul" and spec.n % 32:
        yield ("n",), f"n ({spec.n}) must be a multiple of 32 with silu_mul: half of it are the rows of the gate, in tiles of 16"


def kernel(spec: KernelSpec) -> Iterator[Problem]:
    """Problems between sections, and between workloads."""
    yield from _group("key", spec.key, spec)
    yield from _group("value", spec.value, spec)
    yield from _rotation("key", spec.key, spec)
    yield from _rotation("value", spec.value, spec)

    dim, fraction, channels = spec.attention.head_dim, spec.key.boost.fraction, spec.key.boost.fraction * spec.attention.head_dim
    whole = round(channels)  # 29 / 112 * 112 is a little less than 29
    if 0 < fraction < 1 and (abs(channels - whole) > WHOLE or whole <= 0 or whole >= dim):
        yield ("key", "boost", "fraction"), f"{fraction:g} of {dim} channels is {channels:g}, not a whole number"

    yield from _unquantized(spec)
    for index, work in enumerate(spec.workloads):
        if work.q_len > spec.attention.q_len:
            yield ("workloads", index, "q_len"), f"q_len ({work.q_len}) is more than attention.q_len ({spec.attention.q_len})"
        for place, reason in _lengths(work):
            yield ("workloads", index, *place), reason
    yield from listed_twice(spec.workloads)


def _group(label: str, quant: QuantSpec, spec: KernelSpec) -> Iterator[Problem]:
    dim, page = spec.attention.head_dim, spec.cache.page
    if quant.per_token and dim % quant.group:
        yield (label, "group"), f"{label}.group ({quant.group}) must divide head_dim ({dim}) when the axis is token"
    if quant.per_channel and quant.group % TOKEN_STEP:
        yield (label, "group"), f"{label}.group ({quant.group}) must be a multiple of {TOKEN_STEP} tokens when the axis is channel"
    if quant.per_channel and page is not None and page % quant.group:
        yield ("cache", "page"), f"page ({page}) must be a multiple of {label}.group ({quant.group}): a page holds whole groups"
    if quant.per_channel and spec.cache.arrival:
        reason = "its scales are those of several tokens, which are not all there when one arrives"
        yield (label, "axis"), f"{label}.axis must be token with cache.quantize arrival, not channel: {reason}"


def _rotation(label: str, quant: QuantSpec, spec: KernelSpec) -> Iterator[Problem]:
    dim = spec.attention.head_dim
    if quant.rotate is None:
        return
    if dim % quant.rotate.channels(dim):
        yield (label, "rotate", "block"), f"{label}.rotate.block ({quant.rotate.block}) must divide head_dim ({dim})"
    if label == "value" and quant.rotate.applied == "caller":
        yield (label, "rotate", "applied"), "value.rotate.applied must be kernel: it rotates the output back, and new V with it"
    if not quant.quantized:
        yield (label, "rotate"), f"rotation spreads outliers before codes are made, but {label}.bits is {quant.bits}"


def _unquantized(spec: KernelSpec) -> Iterator[Problem]:
    """Problems of `cache.local` and `cache.sink`."""
    sink, local, window = spec.cache.sink, spec.cache.local, spec.attention.window
    nothing = not spec.key.quantized and not spec.value.quantized
    if local and nothing:
        yield ("cache", "local"), "local keeps the newest tokens unquantized, but nothing is quantized"
    if sink and nothing:
        yield ("cache", "sink"), "sink keeps the first tokens unquantized, but nothing is quantized"
    if sink and window:
        yield ("cache", "sink"), f"sink keeps the first tokens, but attention.window ({window}) never looks back at them"
    if window and local >= window:
        reason = "older tokens are never read, and their pages may be gone when they are packed"
        yield ("cache", "local"), f"local ({local}) is not less than attention.window ({window}): {reason}"


def _lengths(work: Workload) -> Iterator[Problem]:
    """Problems of the lengths of a workload."""
    shortest, longest, distribution = work.lengths.min, work.lengths.max, work.lengths.distribution
    if work.q_len > work.kv_len:
        yield ("q_len",), f"q_len ({work.q_len}) is more than kv_len ({work.kv_len}), which counts the new tokens"
    if longest and longest != work.kv_len:
        yield ("lengths", "max"), f"max ({longest}) is not kv_len ({work.kv_len}), which is the longest: leave max out"
    if distribution == "equal" and shortest:
        yield ("lengths", "min"), f"equal lengths have no min ({shortest}): write distribution: log_uniform"
    if distribution == "equal":
        return
    if shortest is None:
        yield ("lengths", "min"), "required, but missing: the tokens of the shortest sequence"
    elif shortest >= work.kv_len:
        yield ("lengths", "min"), f"min ({shortest}) is not below kv_len ({work.kv_len}), the longest: write lengths: equal"
    elif work.batch == 1:
        yield ("lengths",), "one sequence has one length: write lengths: equal"
    elif work.q_len > shortest:
        yield ("lengths", "min"), f"min ({shortest}) is less than q_len ({work.q_len}): lengths count the new tokens"


def listed_twice(workloads: Sequence[AnyWorkload]) -> Iterator[Problem]:
    """Workloads that stand there a second time."""
    seen: dict[str, int] = {}
    for index, work in enumerate(workloads):
        if work.key in seen:
            yield ("workloads", index), f"{work.key} is listed twice, first as workloads[{seen[work.key]}]"
        seen.setdefault(work.key, index)
