"""Errors of a kernel's outputs on seeded data, against attention over the original K and V and against the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kvgen.format.layout import PackedLayout
from kvgen.runtime.kvcache import KVCache
from kvgen.spec import KernelSpec
from kvgen.verify.cache import ReferenceCache
from kvgen.verify.data import Inputs
from kvgen.verify.quality import Quality, attention, data_sets, errors, zero_sinks
from kvgen.verify.tolerance import relative_l2


class Attender(Protocol):
    """What is needed of a kernel (`kvgen.api.Kernel`)."""

    @property
    def spec(self) -> KernelSpec: ...
    @property
    def layout(self) -> PackedLayout: ...
    def new_cache(self, batch: int | None = None, max_len: int | None = None) -> KVCache: ...
    def prefill(self, cache: KVCache, k: torch.Tensor, v: torch.Tensor) -> None: ...
    def attend(self, q: torch.Tensor, cache: KVCache, *, sinks: torch.Tensor | None) -> torch.Tensor: ...


HEAD_LIMIT = 2.0
"""A single head may be so many times further from the reference than the whole output may."""


@dataclass(frozen=True)
class Outputs:
    """What a format costs, and how exactly a kernel computes it."""

    normal: Quality
    structured: Quality
    kernel_error: float
    """Relative L2 error of the kernel against the fp64 reference over the same quantized cache: of the worst query head of both data sets.

    It is the kernel's own error, which the format has no part in: a scale that is read wrongly in one head is seen here."""


def outputs(kernel: Attender, kv_len: int, seed: int = 0) -> Outputs:
    """Errors of a kernel on normal and structured data, one sequence of `kv_len` tokens each."""
    found: dict[str, Quality] = {}
    worst = 0.0
    for name, inputs in data_sets(kernel.spec, kv_len, seed).items():
        got = _attended(kernel, inputs)
        cache = ReferenceCache(kernel.spec, 1, kernel.layout.tokens)
        cache.prefill(inputs.k, inputs.v)
        k_hat, v_hat = cache.keys_values()
        want = attention(kernel.spec, inputs.q, k_hat, v_hat)
        found[name] = errors(kernel.spec, inputs, got, k_hat)
        worst = max(worst, *(relative_l2(got[:, :, head], want[:, :, head]) for head in range(got.shape[2])))
    return Outputs(found["normal"], found["structured"], worst)


def _attended(kernel: Attender, inputs: Inputs) -> torch.Tensor:
    """The kernel's output over the data, on the CPU."""
    cache = kernel.new_cache(1, inputs.k.shape[1])
    q, k, v = (x.to(cache.device) for x in (inputs.q, inputs.k, inputs.v))
    kernel.prefill(cache, k, v)
    sinks = zero_sinks(kernel.spec)
    return kernel.attend(q, cache, sinks=None if sinks is None else sinks.to(cache.device)).cpu()
