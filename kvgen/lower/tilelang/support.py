"""What the TileLang back end refuses beyond what both GPU back ends do, and which TileLang it needs."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from kvgen.extras import install_line
from kvgen.lower.gpu import GPU_REFUSALS, Refusal, either, narrow_token_group

CHANNEL_GROUPS = (32, 64, 128, 256, 512)
"""Tokens that share params per channel: a KV tile lies within a group."""
OLDEST = "0.1.15"
"""The first TileLang that lowers the programs: older ones neither unroll loops over Python values nor keep what a loop defines."""

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "head_dims that are no multiple of 32",
        lambda s: s.attention.head_dim % 32 != 0,
        "attention.head_dim ({a.head_dim}) is no multiple of 32, which the kernel loads at once",
    ),
    Refusal(
        "boosted channels",
        lambda s: s.key.boost.fraction > 0,
        "key.boost ({k.boost.fraction:g} of channels in 4 bits): K is read as codes of one width",
    ),
    *GPU_REFUSALS,
    Refusal(
        "groups of channels that are no multiple of 32",
        lambda s: narrow_token_group(s.key, 32) or narrow_token_group(s.value, 32),
        "key.group ({k.group}) and value.group ({v.group}) must be multiples of 32 channels where the axis is token, because a matrix "
        "instruction takes 16 channels out of each run of 32",
    ),
    Refusal(
        f"params per channel in groups other than {either(CHANNEL_GROUPS)} tokens",
        lambda s: any(op.per_channel and op.group not in CHANNEL_GROUPS for op in (s.key, s.value)),
        f"where the axis is channel, key.group ({{k.group}}) and value.group ({{v.group}}) must be {either(CHANNEL_GROUPS)} tokens",
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
