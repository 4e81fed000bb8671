"""What the CUDA back end refuses beyond what both GPU back ends do."""

from __future__ import annotations

from kvgen.lower.refusals import GPU_REFUSALS, Refusal
from kvgen.spec import KernelSpec

BOOST_STEP = 16
"""Channels of a step of matrix instructions."""
WHOLE_PAGE = 32
"""Tokens that the kernel takes at once; of smaller pages, two."""
MOST_GROUP = 512
"""Tokens that share params per channel, at most."""


def _small_pages(spec: KernelSpec) -> bool:
    return spec.cache.page is not None and spec.cache.page % WHOLE_PAGE != 0


def _boosted(spec: KernelSpec) -> int:
    return spec.key.boosted(spec.attention.head_dim)


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        f"boosted channels that are no multiple of {BOOST_STEP}",
        lambda s: _boosted(s) % BOOST_STEP != 0,
        f"key.boost.fraction ({{k.boost.fraction:g}} of {{a.head_dim}} channels) is no multiple of {BOOST_STEP} channels, which matrix "
        "instructions take at once",
    ),
    Refusal(
        f"boosted channels in groups that are no multiple of {WHOLE_PAGE} tokens",
        lambda s: s.key.boost.fraction > 0 and s.key.group % WHOLE_PAGE != 0,
        f"key.boost with a key.group ({{k.group}}) that is no multiple of {WHOLE_PAGE} tokens, whose codes share words in a 2-bit K, "
        "is not built",
    ),
    *GPU_REFUSALS,
    Refusal(
        "a 2-bit K in pages that are no multiple of 32 tokens",
        lambda s: _small_pages(s) and s.key.bits == 2,
        f"cache.page ({{c.page}}) is no multiple of {WHOLE_PAGE} tokens, whose codes share words in a 2-bit K",
    ),
    Refusal(
        "params per channel in pages that are no multiple of 32 tokens",
        lambda s: _small_pages(s) and any(op.per_channel for op in (s.key, s.value)),
        f"cache.page ({{c.page}}) is no multiple of {WHOLE_PAGE} tokens, and blocks of 16 hold no params per channel",
    ),
    Refusal(
        f"params per channel in groups of more than {MOST_GROUP} tokens",
        lambda s: any(op.per_channel and op.group > MOST_GROUP for op in (s.key, s.value)),
        f"groups per channel have at most {MOST_GROUP} tokens, which stay unquantized until a block holds whole groups: key.group is "
        "{k.group}, value.group {v.group}",
    ),
)
