"""What the CUDA back end refuses, each by name and reason: one table for lowering and for the documentation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvgen.spec import KernelSpec, QuantSpec

MAX_HEAD_DIM = 256
MAX_GROUP = 16
MAX_QUERIES = 8
MAX_COLUMNS = 64
WHOLE_PAGE = 32
"""Tokens that the kernel takes at once; of smaller pages, two."""
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


def _narrow_token_group(quant: QuantSpec) -> bool:
    return quant.quantized and quant.axis == "token" and quant.group % 32 != 0


def _odd_channel_group(quant: QuantSpec) -> bool:
    return quant.quantized and quant.axis == "channel" and quant.group not in KEY_GROUPS


def _small_pages(spec: KernelSpec) -> bool:
    return spec.cache.page is not None and spec.cache.page % WHOLE_PAGE != 0


REFUSALS: tuple[Refusal, ...] = (
    Refusal("float32", lambda s: s.attention.dtype == "float32", "attention.dtype is float32, and matrix instructions take 16 bits"),
    Refusal("boosted channels", lambda s: s.key.boost.fraction > 0, "key.boost ({k.boost.fraction:g} of channels in 4 bits) is not built"),
    Refusal("sink", lambda s: s.cache.sink > 0, "cache.sink ({c.sink} first tokens kept in dtype) is not built"),
    Refusal("local window of V", lambda s: s.cache.local > 0, "cache.local ({c.local} recent tokens of V kept in dtype) is not built"),
    Refusal("attention sinks", lambda s: s.attention.sinks, "attention.sinks (a learned logit per head) is not built"),
    Refusal(
        "V per channel", lambda s: s.value.quantized and s.value.axis == "channel", "value.axis is channel, and V is scaled per token only"
    ),
    Refusal(
        "head_dim that 32 does not divide",
        lambda s: s.attention.head_dim % 32 != 0,
        "attention.head_dim ({a.head_dim}) is no multiple of 32, which fragments hold together",
    ),
    Refusal(
        f"head_dim above {MAX_HEAD_DIM}",
        lambda s: s.attention.head_dim > MAX_HEAD_DIM,
        f"attention.head_dim ({{a.head_dim}}) is more than {MAX_HEAD_DIM}, for which registers suffice",
    ),
    Refusal(
        f"more than {MAX_GROUP} query heads per KV head",
        lambda s: s.attention.group > MAX_GROUP,
        f"{{a.group}} query heads share a KV head, more than the {MAX_GROUP} of two matrix columns tiles",
    ),
    Refusal(
        f"more than {MAX_QUERIES} query tokens per call",
        lambda s: s.attention.q_len > MAX_QUERIES,
        f"attention.q_len ({{a.q_len}}) is more than {MAX_QUERIES}, which a decode kernel holds at once; longer calls need no q_len",
    ),
    Refusal(
        f"more than {MAX_COLUMNS} query heads times query tokens per KV head",
        lambda s: s.attention.group * s.attention.q_len > MAX_COLUMNS,
        f"{{a.group}} query heads times {{a.q_len}} query tokens have more sums than registers hold ({MAX_COLUMNS} columns)",
    ),
    Refusal(
        "K per channel in groups other than 32, 64, 128 or 256 tokens",
        lambda s: _odd_channel_group(s.key),
        f"key.group ({{k.group}} tokens) must be one of {', '.join(map(str, KEY_GROUPS))}",
    ),
    Refusal(
        "K per token in groups that are no multiple of 32 channels",
        lambda s: _narrow_token_group(s.key),
        "key.group ({k.group} channels) must be a multiple of 32",
    ),
    Refusal(
        "V per token in groups that are no multiple of 32 channels",
        lambda s: _narrow_token_group(s.value),
        "value.group ({v.group} channels) must be a multiple of 32",
    ),
    Refusal(
        "a 2-bit K in pages that are no multiple of 32 tokens",
        lambda s: _small_pages(s) and s.key.bits == 2,
        f"cache.page ({{c.page}}) is no multiple of {WHOLE_PAGE} tokens, whose codes share words in a 2-bit K",
    ),
)


def refusal(spec: KernelSpec) -> str | None:
    """The first reason why the spec cannot be lowered, or None."""
    return next((entry.text(spec) for entry in REFUSALS if entry.applies(spec)), None)
