"""The loss of accuracy of a format against an unquantized cache. `python -m kvgen.reference.quality` prints the presets' table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from kvgen.reference.attention import attend, weights
from kvgen.reference.cache import ReferenceCache
from kvgen.reference.data import Inputs, normal, structured
from kvgen.reference.tolerance import relative_l2
from kvgen.spec import KernelSpec, presets

BLOCK = 128


@dataclass(frozen=True)
class Quality:
    """Errors of attention over a quantized cache, against attention over the original K and V."""

    relative_l2: float
    """Of the output."""
    weights_l1: float
    """Sum over positions of |weight - true weight|, mean over queries and heads: 0 is right, 2 is all wrong."""


def quality(spec: KernelSpec, inputs: Inputs, block: int = BLOCK) -> Quality:
    """Errors of the spec's format on these inputs, packed in blocks of `block` tokens; sinks are taken as 0."""
    att = spec.attention
    sinks = torch.zeros(att.q_heads) if att.sinks else None
    cache = ReferenceCache(spec, len(inputs.q), block)
    cache.prefill(inputs.k, inputs.v)
    k_hat, v_hat = cache.keys_values()
    look = partial(attend, inputs.q, softcap=att.softcap, window=att.window, sinks=sinks)
    weigh = partial(weights, inputs.q, softcap=att.softcap, window=att.window, sinks=sinks)
    got, want = look(k_hat, v_hat)[0], look(inputs.k, inputs.v)[0]
    moved = weigh(k_hat) - weigh(inputs.k)
    return Quality(relative_l2(got, want), float(moved.abs().sum(-1).mean()))


def table(kv_len: int = 4096, logit: float = 20.0) -> str:
    """Markdown: a row per preset, on normal and on structured data."""
    rows = ["| preset | normal: L2 | weights L1 | structured: L2 | weights L1 |", "|---|---|---|---|---|"]
    for name, spec in presets().items():
        found = []
        for inputs in (normal(spec, 1, kv_len), structured(spec, 1, kv_len, logit=logit)):
            measured = quality(spec, inputs)
            found += [f"{measured.relative_l2:.4f}", f"{measured.weights_l1:.4f}"]
        rows.append(f"| `{name}` | {' | '.join(found)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
