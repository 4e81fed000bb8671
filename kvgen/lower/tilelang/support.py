"""What the TileLang back end refuses, each by name and reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from kvgen.extras import install_line
from kvgen.spec import KernelSpec, QuantSpec

OLDEST = "0.1.15"
"""The first TileLang that lowers the programs: older ones neither unroll loops over Python values nor keep what a loop defines."""
MAX_GROUP = 16
MAX_QUERIES = 8
KEY_GROUPS = (32, 64, 128, 256)


@dataclass(frozen=True)
class Refusal:
    """A feature of the spec language that is not built. `reason` may name fields of the spec in {braces}."""

    feature: str
    applies: Callable[[KernelSpec], bool]
    reason: str

    def text(self, spec: KernelSpec) -> str:
        """The reason with the spec's own values."""
        return self.reason.format(a=spec.attention, k=spec.key, v=spec.value, c=spec.cache)


def _narrow(quant: QuantSpec) -> bool:
    return quant.axis == "token" and quant.group % 32 != 0


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "float32", lambda s: s.attention.dtype == "float32", "attention.dtype is float32, and its matrix instructions take 16-bit numbers"
    ),
    Refusal("16-bit K", lambda s: not s.key.quantized, "key.bits is 16: K is read as codes only"),
    Refusal("16-bit V", lambda s: not s.value.quantized, "value.bits is 16: V is read as codes only"),
    Refusal(
        "boosted channels", lambda s: s.key.boost.fraction > 0, "key.boost ({k.boost.fraction:g} of the channels in 4 bits) is not built"
    ),
    Refusal("sink", lambda s: s.cache.sink > 0, "cache.sink ({c.sink} first tokens kept in dtype) is not built"),
    Refusal("local window of V", lambda s: s.cache.local > 0, "cache.local ({c.local} recent tokens of V kept in dtype) is not built"),
    Refusal("attention sinks", lambda s: s.attention.sinks, "attention.sinks (a learned logit per head) is not built"),
    Refusal("V per channel", lambda s: s.value.axis == "channel", "value.axis is channel: V is scaled per token only"),
    Refusal(
        "other head_dims",
        lambda s: s.attention.head_dim not in (64, 96, 128, 256),
        "attention.head_dim ({a.head_dim}) is not 64, 96, 128 or 256",
    ),
    Refusal("wide groups", lambda s: s.attention.group > MAX_GROUP, f"{{a.group}} query heads share a KV head, more than {MAX_GROUP}"),
    Refusal("long queries", lambda s: s.attention.q_len > MAX_QUERIES, f"attention.q_len ({{a.q_len}}) is more than {MAX_QUERIES}"),
    Refusal(
        "K per channel in odd groups",
        lambda s: s.key.axis == "channel" and s.key.group not in KEY_GROUPS,
        f"key.group ({{k.group}} tokens) must be one of {', '.join(map(str, KEY_GROUPS))}",
    ),
    Refusal("K per token in narrow groups", lambda s: _narrow(s.key), "key.group ({k.group} channels) must be a multiple of 32"),
    Refusal("V per token in narrow groups", lambda s: _narrow(s.value), "value.group ({v.group} channels) must be a multiple of 32"),
    Refusal(
        "pages of odd size",
        lambda s: s.cache.page is not None and s.cache.page % 32 != 0,
        "cache.page ({c.page}) is no multiple of 32 tokens, which the kernel reads at once",
    ),
)


def refusal(spec: KernelSpec) -> str | None:
    """The first reason why the spec cannot be lowered, or None."""
    return next((entry.text(spec) for entry in REFUSALS if entry.applies(spec)), None)


def missing() -> str | None:
    """Why TileLang cannot be used here, or None. It is not imported."""
    found = _installed()
    if found is None:
        return f"tilelang is not installed: {install_line('tilelang')}"
    return None if _release(found) >= _release(OLDEST) else f"tilelang {found} is installed, and its programs need {OLDEST} or newer"


def tilelang_version() -> str:
    """The TileLang that lowers here. Another one may print other text, so it is part of what kernels are kept by.

    Without one that lowers it is the oldest that does: what was lowered with it can be had again.
    """
    found = _installed()
    return found if found is not None and missing() is None else OLDEST


def _installed() -> str | None:
    try:
        return version("tilelang")
    except PackageNotFoundError:
        return None


def _release(text: str) -> tuple[int, ...]:
    """The numbers of a version: (0, 1, 15) for 0.1.15.post1."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])
