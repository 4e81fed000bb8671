"""Inputs of one workload for timing: caches full of real quantized data, as many as it takes to leave the device's caches."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvgen.measure.bytes import half_full, must_read
from kvgen.measure.device import cold_bytes
from kvgen.measure.job import TimingPolicy
from kvgen.measure.timer import timer_for
from kvgen.reference.data import normal
from kvgen.spec import Workload
from kvgen.toolchain.launch import KVCache, Variant

MOST_COPIES = 64
PATTERN_BLOCKS = 4


class Bench:
    """A workload over one layout; every variant of that layout can be timed on it."""

    def __init__(self, variant: Variant, workload: Workload, device: torch.device | str, cold: int | None = None) -> None:
        self.workload = workload
        self.device = torch.device(device)
        layout = variant.layout
        self.length = half_full(layout, workload.kv_len)
        self.nbytes = must_read(variant.spec, layout, [self.length] * workload.batch)
        cold = cold_bytes(self.device.type) if cold is None else cold
        copies = max(1, min(MOST_COPIES, -(-cold // self.nbytes)))
        pattern = self._pattern(variant)
        self._caches = [self._filled(variant, pattern) for _ in range(copies)]
        inputs = normal(variant.spec, workload.batch, workload.q_len, q_len=workload.q_len, seed=1)
        self._q, self._k, self._v = (x.to(self.device) for x in (inputs.q, inputs.k, inputs.v))
        self._outs = [torch.empty_like(self._q) for _ in range(copies)]

    @property
    def held_bytes(self) -> int:
        """Memory of the caches."""
        return sum(cache.nbytes for cache in self._caches)

    def time(self, variant: Variant, policy: TimingPolicy) -> tuple[float, ...]:
        """Samples in µs per call of `policy.call`. Raises MeasureError, and CacheMismatch for another layout."""
        if variant.module.set_threads is not None and policy.threads is not None:
            variant.module.set_threads(policy.threads)
        turns = range(len(self._caches))
        try:
            for cache in self._caches:
                variant.prepare(cache)
            timer = timer_for(self.device)
            if policy.call == "attend":
                return timer.time([self._attend(variant, i) for i in turns], policy)
            steps = max(1, variant.layout.tokens // self.workload.q_len)
            samples = timer.time([self._decode(variant, i, steps) for i in turns], policy)
            return tuple(sample / steps for sample in samples)
        finally:
            for cache in self._caches:
                variant.release(cache)

    def _attend(self, variant: Variant, index: int) -> Callable[[], object]:
        cache, out, q = self._caches[index], self._outs[index], self._q
        return lambda: variant.attend(q, cache, out=out)

    def _decode(self, variant: Variant, index: int, steps: int) -> Callable[[], object]:
        """A block's worth of steps, one flush among them, over lengths of which the workload's is the mean; then back to that."""
        cache, out = self._caches[index], self._outs[index]
        start = max(0, self.length - steps * self.workload.q_len // 2)

        def begin(length: int) -> None:
            cache.lengths.fill_(length)
            cache.bound = length

        def run() -> None:
            begin(start)
            for _ in range(steps):
                variant.decode(self._q, self._k, self._v, cache, out=out)
            begin(self.length)

        return run

    def _pattern(self, variant: Variant) -> KVCache:
        """A few blocks of one sequence, packed by the variant itself: real codes to fill large caches with."""
        tokens = PATTERN_BLOCKS * variant.layout.tokens
        page = variant.spec.cache.page
        room = tokens if page is None else max(tokens, page)
        inputs = normal(variant.spec, 1, tokens, seed=2)
        cache = variant.new_cache(1, room, self.device)
        variant.prefill(cache, inputs.k.to(self.device), inputs.v.to(self.device))
        return cache

    def _filled(self, variant: Variant, pattern: KVCache) -> KVCache:
        work, layout = self.workload, variant.layout
        room = self.length + layout.tokens + work.q_len
        cache = variant.new_cache(work.batch, room, self.device)
        if cache.block_table is not None:
            order = torch.randperm(cache.packed.shape[0], generator=torch.Generator().manual_seed(3)).to(torch.int32)
            cache.block_table.copy_(order.reshape(cache.block_table.shape))
        blocks = pattern.packed.transpose(1, 2).flatten(0, 1)[:PATTERN_BLOCKS].transpose(0, 1)  # [heads, blocks, bytes]
        index = torch.arange(cache.packed.shape[2], device=self.device) % PATTERN_BLOCKS
        cache.packed.copy_(blocks[:, index].unsqueeze(0).expand(cache.packed.shape))
        random = torch.Generator().manual_seed(4)
        for residual in (cache.k_residual, cache.v_residual):
            residual.copy_(torch.randn(residual.shape[1:], generator=random).to(residual.dtype).unsqueeze(0))
        cache.lengths.fill_(self.length)
        cache.bound = self.length
        return cache
