"""What the TileLang back end refuses beyond what both GPU back ends do, and which TileLang it needs."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from kvgen.extras import install_line
from kvgen.lower.gpu import GPU_REFUSALS, Refusal, either

CHANNEL_GROUPS = (32, 64, 128, 256, 512)
"""Tokens that share K's params per channel: a KV tile lies within a group."""
MAX_HEAD_DIM = 128
OLDEST = "0.1.15"
"""The first TileLang that lowers the programs: older ones do not keep what a loop defines."""

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "boosted channels",
        lambda s: s.key.boost.fraction > 0,
        "key.boost ({k.boost.fraction:g} of channels in 4 bits): K is read as codes of one width",
    ),
    Refusal(
        "K or V of 16 bits",
        lambda s: not (s.key.quantized and s.value.quantized),
        "key.bits ({k.bits}) and value.bits ({v.bits}) must be 8, 4 or 2: the program expands codes",
    ),
    *GPU_REFUSALS,
    Refusal(
        f"head_dims other than 32, 64, 96 and {MAX_HEAD_DIM}",
        lambda s: s.attention.head_dim % 32 != 0 or s.attention.head_dim > MAX_HEAD_DIM,
        f"attention.head_dim ({{a.head_dim}}) is no multiple of 32 up to {MAX_HEAD_DIM}: a warp holds the output of whole query rows",
    ),
    Refusal(
        "several scales per token",
        lambda s: any(op.axis == "token" and op.group != s.attention.head_dim for op in (s.key, s.value)),
        "key.group ({k.group}) and value.group ({v.group}) must be head_dim where the axis is token: a token has one scale",
    ),
    Refusal("V per channel", lambda s: s.value.per_channel, "value.axis is channel, and weights take one scale per token"),
    Refusal(
        f"K per channel in groups other than {either(CHANNEL_GROUPS)} tokens",
        lambda s: s.key.per_channel and s.key.group not in CHANNEL_GROUPS,
        f"where the axis is channel, key.group ({{k.group}}) must be {either(CHANNEL_GROUPS)} tokens",
    ),
    Refusal("soft caps", lambda s: bool(s.attention.softcap), "attention.softcap ({a.softcap:g}): scores are taken as they are"),
    Refusal("sliding windows", lambda s: s.attention.window is not None, "attention.window ({a.window}): all cached tokens are read"),
    Refusal("learned sinks", lambda s: s.attention.sinks, "attention.sinks: the denominator has no logit of its own"),
    Refusal(
        "sink, local and rollback tokens",
        lambda s: s.cache.sink + s.cache.local + s.cache.rollback > 0,
        "cache.sink ({c.sink}), cache.local ({c.local}) and cache.rollback ({c.rollback}) must be 0: the residual is the block that fills",
    ),
    Refusal(
        "pages that are no multiple of 32 tokens",
        lambda s: s.cache.page is not None and s.cache.page % 32 != 0,
        "cache.page ({c.page}) is no multiple of 32 tokens, which the kernel reads at once",
    ),
)


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
