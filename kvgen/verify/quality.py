"""The loss of accuracy of a format against an unquantized cache."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

from kvgen.format.sizes import usual_block
from kvgen.spec import KernelSpec
from kvgen.verify.attention import attend, weights
from kvgen.verify.cache import WholeSequences
from kvgen.verify.data import Inputs, normal, structured
from kvgen.verify.tolerance import relative_l2

KV_LEN = 4096
LOGIT = 20.0
"""Largest score of structured data: the loss of a format is told apart best where the softmax is neither flat nor at one token."""


@dataclass(frozen=True)
class Quality:
    """Errors of attention over a quantized cache, against attention over the original K and V."""

    relative_l2: float
    """Of the output."""
    cosine: float
    """Between outputs, mean over queries and heads: 1 is right."""
    weights_l1: float
    """Sum over positions of |weight - true weight|, mean over queries and heads: 0 is right, 2 is all wrong."""


@cache
def format_quality(spec: KernelSpec) -> dict[str, Any]:
    """What a format costs on normal and structured data, as plain data for a registry's entry: a property of the format, of no device."""
    kv_len = max(KV_LEN, 4 * usual_block(spec) + spec.cache.unpacked)  # some blocks are packed
    data = {"normal": normal(spec, 1, kv_len), "structured": structured(spec, 1, kv_len, logit=LOGIT)}
    return {**{name: asdict(quality(spec, one)) for name, one in data.items()}, "kv_len": kv_len, "logit": LOGIT, "seed": 0}


def quality(spec: KernelSpec, inputs: Inputs, block: int | None = None) -> Quality:
    """Errors of the spec's format on these inputs, packed in blocks of `block` tokens (the usual ones); sinks are taken as 0."""
    att, batch, tokens = spec.attention, *inputs.k.shape[:2]
    how: dict[str, Any] = {"softcap": att.softcap, "window": att.window, "sinks": torch.zeros(att.q_heads) if att.sinks else None}
    k, v = WholeSequences(spec, block or usual_block(spec), inputs.k, inputs.v).seen([tokens] * batch)
    out, want = (attend(inputs.q, *pair, **how)[0] for pair in ((k, v), (inputs.k, inputs.v)))
    found, right = (weights(inputs.q, one, **how) for one in (k, inputs.k))
    cosine = torch.cosine_similarity(out, want, dim=-1)
    return Quality(relative_l2(out, want), float(cosine.mean()), float((found - right).abs().sum(-1).mean()))
