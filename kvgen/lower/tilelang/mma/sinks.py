# mypy: disable-error-code="untyped-decorator"
"""Learned sinks: each query head has a logit that joins the softmax denominator and has no value, as in gpt-oss. It joins when an
output is written, so it counts once however many splits a head has."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from kvgen.lower.tilelang.mma.state import LOG2E, MIN_SCORE


@T.macro
def join_sink(k: Any, r: Any, head: Any) -> None:
    """Add the logit of a query head to (row_max, row_sum) in `top`, and rescale the outputs in `factor`. row_max is lazy, so the logit
    may lie far above or below it: the larger one becomes row_max, and no power of two overflows. That of a row without tokens means
    nothing."""
    r.v[0] = k.sinks[head] * T.float32(LOG2E)
    r.v[1] = T.max(T.if_then_else(r.top[1] == 0.0, T.float32(MIN_SCORE), r.top[0]), r.v[0])
    r.v[0] = T.call_extern("float32", "kvgen::ptx::exp2", r.v[0] - r.v[1])
    r.top[0] = T.call_extern("float32", "kvgen::ptx::exp2", T.min(r.top[0] - r.v[1], T.float32(0.0)))
    r.top[1] = r.top[1] * r.top[0] + r.v[0]
    r.factor[0] = r.factor[0] * r.top[0]
    r.factor[1] = r.factor[1] * r.top[0]
    r.top[0] = r.v[1]
