"""The loss of accuracy of a format against an unquantized cache. `python -m kvgen.verify.quality` prints the presets' table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

from kvgen.format.sizes import usual_block
from kvgen.spec import KernelSpec, presets
from kvgen.verify.attention import attend, weights
from kvgen.verify.cache import ReferenceCache
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


def data_sets(spec: KernelSpec, kv_len: int = KV_LEN, seed: int = 0) -> dict[str, Inputs]:
    """Normal and structured inputs of one sequence, by name."""
    return {"normal": normal(spec, 1, kv_len, seed=seed), "structured": structured(spec, 1, kv_len, seed=seed, logit=LOGIT)}


def quality(spec: KernelSpec, inputs: Inputs, block: int | None = None) -> Quality:
    """Errors of the spec's format on these inputs, packed in blocks of `block` tokens (the usual ones); sinks are taken as 0."""
    cache = ReferenceCache(spec, len(inputs.q), block or usual_block(spec))
    cache.prefill(inputs.k, inputs.v)
    k_hat, v_hat = cache.keys_values()
    return errors(spec, inputs, attention(spec, inputs.q, k_hat, v_hat), k_hat)


def attention(spec: KernelSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The output of the spec's attention in fp64; sinks are taken as 0."""
    att = spec.attention
    return attend(q, k, v, softcap=att.softcap, window=att.window, sinks=zero_sinks(spec))[0]


def zero_sinks(spec: KernelSpec) -> torch.Tensor | None:
    """Sink logits of 0, float32 [q_heads], for a spec that has them; else None."""
    return torch.zeros(spec.attention.q_heads) if spec.attention.sinks else None


def errors(spec: KernelSpec, inputs: Inputs, out: torch.Tensor, k_hat: torch.Tensor) -> Quality:
    """Errors of an output, and of the weights that follow from K as it reads back."""
    att, want = spec.attention, attention(spec, inputs.q, inputs.k, inputs.v)
    found, right = (weights(inputs.q, k, softcap=att.softcap, window=att.window, sinks=zero_sinks(spec)) for k in (k_hat, inputs.k))
    cosine = torch.cosine_similarity(out.double(), want, dim=-1)
    return Quality(relative_l2(out, want), float(cosine.mean()), float((found - right).abs().sum(-1).mean()))


@cache
def format_quality(spec: KernelSpec) -> dict[str, Any]:
    """What a format costs on normal and structured data, as plain data for a registry's entry: a property of the format, of no device."""
    kv_len = max(KV_LEN, 4 * usual_block(spec) + spec.cache.unpacked)  # some blocks are packed
    found = {name: asdict(quality(spec, inputs)) for name, inputs in data_sets(spec, kv_len).items()}
    return {**found, "kv_len": kv_len, "logit": LOGIT, "seed": 0}


def table() -> str:
    """Markdown: a row per preset, on normal and on structured data."""
    rows = ["| preset | normal: L2 | weights L1 | structured: L2 | weights L1 |", "|---|---|---|---|---|"]
    for name, spec in presets().items():
        found = [quality(spec, inputs) for inputs in data_sets(spec).values()]
        cells = [f"{value:.4f}" for one in found for value in (one.relative_l2, one.weights_l1)]
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
